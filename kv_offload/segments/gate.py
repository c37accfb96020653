"""Who may write to memory that is given back some day: threads that hold no lock of Python's, and none after the end.

Machine code enters and leaves with one atomic addition each; what ends a load closes the gate from Python.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

_CLOSED = -(1 << 62)
"""Added once: whoever adds 1 to a negative number was not let in."""


class Gate:
    """Open until closed for good. `close` is for one thread at a time.

    Attributes:
        address: of the number of those inside, a 64-bit word: what machine code adds 1 to, and subtracts it again. It
            is inside if the word was not negative before.
    """

    __slots__ = ("_word", "address")

    def __init__(self) -> None:
        self._word = np.zeros(1, np.int64)
        self.address: int = self._word.ctypes.data

    def close(self) -> bool:
        """Nobody enters any more. True if nobody is inside either; else ask again: it takes them as long as a copy."""
        add = _compiled()
        inside = add(self.address, 0)
        if inside >= 0:
            inside = add(self.address, _CLOSED) + _CLOSED
        return inside == _CLOSED


def intrinsic() -> Callable[..., Any]:
    """For use in functions that numba compiles: `add(address, value)`, which returns what the word was before. All
    threads see all such additions, and what was written before each of them, in one order."""
    ir = importlib.import_module("llvmlite.ir")
    types = importlib.import_module("numba").types
    word = ir.IntType(64)

    def generate(_context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        address, value = arguments
        return builder.atomic_rmw("add", builder.inttoptr(address, word.as_pointer()), value, "seq_cst")

    @importlib.import_module("numba.extending").intrinsic  # type: ignore[untyped-decorator]
    def add(_context, address, value):  # type: ignore[no-untyped-def]
        return types.int64(types.uint64, types.int64), generate

    return add  # type: ignore[no-any-return]


def prepare() -> None:
    """Compile now, and not when the first load is late."""
    _compiled()


@functools.cache
def _compiled() -> Callable[[int, int], int]:
    add = intrinsic()

    def added(address, value):  # type: ignore[no-untyped-def]
        return add(address, value)

    build: Callable[[Any], Callable[[int, int], int]] = importlib.import_module("numba").njit("int64(uint64, int64)")
    return build(added)

"""A cache bounded in bytes, for values whose size the caller knows."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class ByteLru(Generic[K, V]):
    """What was used longest ago goes first. Not thread-safe by itself."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._values: OrderedDict[K, V] = OrderedDict()
        self._sizes: dict[K, int] = {}
        self.get: Callable[[K], V | None] = self._values.get
        """The value; `touch` it if it was of use."""

    def touch(self, keys: Iterable[K]) -> None:
        """Mark as used, the last one as used last; all of them are there."""
        move = self._values.move_to_end
        for key in keys:
            move(key)

    def put(self, key: K, value: V, size: int) -> None:
        """Keep `value`, of about `size` bytes with its key."""
        self._bytes += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self._values[key] = value
        self._values.move_to_end(key)
        while self._bytes > self._max_bytes:
            oldest, _ = self._values.popitem(last=False)
            self._bytes -= self._sizes.pop(oldest)

    def __contains__(self, key: K) -> bool:
        return key in self._values

    @property
    def size(self) -> int:
        """Bytes that are kept."""
        return self._bytes

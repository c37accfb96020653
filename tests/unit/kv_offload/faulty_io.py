"""A `BlockIO` with faults: what a failing, slow, hanging or lying disk and a crash look like to whoever stores blocks.

Faults are laid on before or while it is used, from any thread, and count operations from then on: pieces of reads and
writes, calls of `open` and `sync`. Everything else goes to the backend below unharmed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tests.conformance.block_io import PREAD
from vllm_pd.kv_offload.block_io.aligned import ALIGNMENT
from vllm_pd.kv_offload.block_io.base import BlockIO, OpenFile, Piece

Op = Literal["open", "read", "write", "sync"]
HANG_LIMIT_S = 60.0
"""A test that forgets to release a hanging operation fails instead of standing still."""


@dataclass
class Fault:
    """One fault; `hits` counts the operations that met it.

    Attributes:
        op: which operations.
        kind: what happens to them.
        skip: so many operations are left alone first.
        times: then so many meet it; None is every one.
    """

    op: Op
    kind: Literal["error", "short", "flip", "hang", "delay"]
    skip: int = 0
    times: int | None = 1
    errno: int = errno.EIO
    byte: int = 0
    delay_s: float = 0.0
    hits: int = 0
    entered: threading.Event = field(default_factory=threading.Event)
    """Set when an operation has met it."""
    released: threading.Event = field(default_factory=threading.Event)

    def release(self) -> None:
        """Operations that hang go on, and no further one hangs."""
        self.times = 0
        self.released.set()

    def meets(self) -> bool:
        if self.skip:
            self.skip -= 1
            return False
        if self.times is not None:
            if not self.times:
                return False
            self.times -= 1
        self.hits += 1
        return True


class FaultyIO:
    """`BlockIO` over another one.

    Attributes:
        counts: operations so far, of each kind.
        crashed: the crash of `crash_after` has come: nothing reaches the disk any more.
    """

    def __init__(self, inner: BlockIO) -> None:
        self.inner = inner
        self.name = f"faulty {inner.name}"
        self._pread = PREAD(self._read_plainly)
        self.pread: int = ctypes.cast(self._pread, ctypes.c_void_p).value or 0
        self.counts: dict[Op, int] = {"open": 0, "read": 0, "write": 0, "sync": 0}
        self.crashed = False
        self._lock = threading.Lock()
        self._faults: list[Fault] = []
        self._bytes_left: int | None = None
        self._order: random.Random | None = None

    def fail(self, op: Op, *, skip: int = 0, times: int | None = 1, error: int = errno.EIO) -> Fault:
        """Operations fail with this errno, before anything is moved."""
        return self._lay(Fault(op, "error", skip, times, errno=error))

    def cut_short(self, op: Op, *, skip: int = 0, times: int | None = 1) -> Fault:
        """The first half is moved; the rest is not, and the operation says so (EIO)."""
        return self._lay(Fault(op, "short", skip, times))

    def flip_bit(self, op: Op, *, skip: int = 0, times: int | None = 1, byte: int = 0) -> Fault:
        """One bit of that byte of a piece is wrong, in memory (read) or on the disk (write), and nothing says so."""
        return self._lay(Fault(op, "flip", skip, times, byte=byte))

    def hang(self, op: Op, *, skip: int = 0, times: int | None = 1) -> Fault:
        """Operations stand still, before anything is moved, until the fault is released."""
        return self._lay(Fault(op, "hang", skip, times))

    def delay(self, op: Op, seconds: float, *, skip: int = 0, times: int | None = None) -> Fault:
        """Operations begin so much later."""
        return self._lay(Fault(op, "delay", skip, times, delay_s=seconds))

    def crash_after(self, written: int, order: random.Random | None = None) -> None:
        """After so many more bytes no write, sync or creation reaches the disk: as if the machine had lost power.

        The write that crosses the limit is cut there, not at a sector's border. Operations after it fail with EIO, so
        that whoever uses this can be shut down. `order` shuffles the pieces of each write, as a device may.
        """
        with self._lock:
            self._bytes_left, self._order = written, order

    def clear(self) -> None:
        """No more faults; what hangs goes on. A crash stays."""
        with self._lock:
            faults, self._faults = self._faults, []
        for fault in faults:
            fault.release()

    def open(self, path: Path, *, create_bytes: int | None = None) -> OpenFile:
        self._before("open")
        if create_bytes is not None:
            self._alive()
        return self.inner.open(path, create_bytes=create_bytes)

    def sync(self, file: OpenFile) -> None:
        self._before("sync")
        self._alive()
        self.inner.sync(file)

    def close(self) -> None:
        self.clear()
        self.inner.close()

    def read(self, pieces: Sequence[Piece]) -> list[OSError | None]:
        return self._move("read", pieces)

    def write(self, pieces: Sequence[Piece]) -> list[OSError | None]:
        if self._bytes_left is None:
            return self._move("write", pieces)
        order = list(range(len(pieces)))
        if self._order is not None:
            self._order.shuffle(order)
        results: list[OSError | None] = [None] * len(pieces)
        for index in order:
            allowed = self._spend(pieces[index].length)
            if allowed == pieces[index].length:
                [results[index]] = self._move("write", [pieces[index]])
            else:
                _write_bytes(pieces[index], allowed)
                results[index] = OSError(errno.EIO, "crashed", str(pieces[index].file.path))
        return results

    def _read_plainly(self, fd: int, address: int, length: int, offset: int) -> int:
        """As pread(2) for machine code; a read is one operation here, however many blocks it is."""
        try:
            met = self._before("read")
        except OSError:
            return -1
        memory = (ctypes.c_ubyte * length).from_address(address)
        if any(fault.kind == "short" for fault in met):
            os.preadv(fd, [memoryview(memory)[: length // 2 // ALIGNMENT * ALIGNMENT]], offset)
            return 0
        try:
            moved = os.preadv(fd, [memory], offset)
        except OSError:
            return -1
        for fault in met:
            if fault.kind == "flip" and fault.byte < moved:
                memory[fault.byte] ^= 1
        return moved

    def _lay(self, fault: Fault) -> Fault:
        with self._lock:
            self._faults.append(fault)
        return fault

    def _alive(self) -> None:
        if self.crashed:
            raise OSError(errno.EIO, "crashed")

    def _spend(self, length: int) -> int:
        """How much of a write still reaches the disk."""
        with self._lock:
            assert self._bytes_left is not None
            allowed = min(length, self._bytes_left)
            self._bytes_left -= allowed
            self.crashed = self.crashed or allowed < length
            return allowed

    def _met(self, op: Op) -> list[Fault]:
        with self._lock:
            self.counts[op] += 1
            met = [fault for fault in self._faults if fault.op == op and fault.meets()]
        for fault in met:
            fault.entered.set()
        return met

    def _before(self, op: Op) -> list[Fault]:
        """Counts an operation, waits where it has to; the faults that are left.

        Raises:
            OSError: the operation fails.
        """
        met = self._met(op)
        for fault in met:
            if fault.kind == "delay":
                time.sleep(fault.delay_s)
            elif fault.kind == "hang" and not fault.released.wait(HANG_LIMIT_S):
                raise AssertionError(f"a hanging {op} was not released within {HANG_LIMIT_S:g} s")
        for fault in met:
            if fault.kind == "error":
                raise OSError(fault.errno, os.strerror(fault.errno))
        return met

    def _move(self, op: Literal["read", "write"], pieces: Sequence[Piece]) -> list[OSError | None]:
        results: list[OSError | None] = [None] * len(pieces)
        whole: list[int] = []
        flips: list[tuple[int, int]] = []
        for index, piece in enumerate(pieces):
            try:
                met = self._before(op)
            except OSError as error:
                results[index] = OSError(error.errno, error.strerror, str(piece.file.path))
                continue
            if any(fault.kind == "short" for fault in met):
                half = piece.length // 2 // piece.file.alignment * piece.file.alignment
                self._inner(op, [Piece(piece.file, piece.offset, piece.address, half)])
                results[index] = OSError(errno.EIO, "cut short", str(piece.file.path))
                continue
            whole.append(index)
            flips += [(index, fault.byte) for fault in met if fault.kind == "flip"]
        for index, result in zip(whole, self._inner(op, [pieces[index] for index in whole]), strict=True):
            results[index] = result
        for index, byte in flips:
            _flip(op, pieces[index], byte)
        return results

    def _inner(self, op: Literal["read", "write"], pieces: Sequence[Piece]) -> list[OSError | None]:
        return self.inner.read(pieces) if op == "read" else self.inner.write(pieces)


def _flip(op: Literal["read", "write"], piece: Piece, byte: int) -> None:
    if op == "read":
        ctypes.c_ubyte.from_address(piece.address + byte).value ^= 1
        return
    with piece.file.path.open("r+b", buffering=0) as file:
        file.seek(piece.offset + byte)
        was = file.read(1)
        file.seek(piece.offset + byte)
        file.write(bytes([was[0] ^ 1]))


def _write_bytes(piece: Piece, length: int) -> None:
    """The first `length` bytes of a piece, any number, past O_DIRECT."""
    if length:
        with piece.file.path.open("r+b", buffering=0) as file:
            file.seek(piece.offset)
            file.write(ctypes.string_at(piece.address, length))

"""A disk that loses its power: what was written since the last sync is there whole, in part, or not at all.

Everything goes to real files at once, and what it overwrote is remembered. At the power cut each sector that was not
synced goes back to what it was, or not, by chance; the same for files that were made, cut or removed and whose folder
was not synced. After the cut every operation fails, so that the store over it can be ended.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from vllm_pd.kv_offload.block_io.base import OpenFile, Piece
from vllm_pd.kv_offload.segments import folder

SECTOR = 512


class _Cut(OSError):
    def __init__(self) -> None:
        super().__init__(errno.EIO, "the power is off")


@dataclass
class _Before:
    """What a write replaced."""

    path: Path
    offset: int
    data: bytes


def _one_at_a_time(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def locked(self: PowerCutDisk, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return method(self, *args, **kwargs)

    return locked


class PowerCutDisk:
    """A `BlockIO`, and in place of the functions with which the store changes folders.

    Args:
        after: operations that still work; pieces of a write count each.
        rng: what is lost.
        loses: False is the death of the process alone: what was written is there.
    """

    name = "power cut"

    def __init__(self, after: int, rng: random.Random, *, loses: bool) -> None:
        self.left = after
        self.rng = rng
        self.loses = loses
        self.off = False
        self._unsynced: list[_Before] = []
        self._made: set[Path] = set()
        self._removed: dict[Path, bytes] = {}
        # A sync, or a footer, may come beside other writes.
        self._lock = threading.RLock()

    def take_over(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The store's other changes of the folder go through this disk too."""
        monkeypatch.setattr(folder, "cut_file", self.cut_file)
        monkeypatch.setattr(folder, "remove_file", self.remove_file)
        monkeypatch.setattr(folder, "sync_folder", self.sync_folder)

    @_one_at_a_time
    def open(self, path: Path, *, create_bytes: int | None = None) -> OpenFile:
        if create_bytes is not None:
            self._spend()
        elif self.off:
            raise _Cut
        fd = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if create_bytes is not None else 0), 0o600)
        if create_bytes is not None:
            os.truncate(fd, create_bytes)
            self._made.add(path)
        return OpenFile(path, fd, alignment=1, direct=False)

    @_one_at_a_time
    def read(self, pieces: Sequence[Piece]) -> list[OSError | None]:
        return [self._read(piece) for piece in pieces]

    @_one_at_a_time
    def write(self, pieces: Sequence[Piece]) -> list[OSError | None]:
        # A device may take them in any order.
        results: list[OSError | None] = [None] * len(pieces)
        for i in self.rng.sample(range(len(pieces)), len(pieces)):
            results[i] = self._write(pieces[i])
        return results

    @_one_at_a_time
    def sync(self, file: OpenFile) -> None:
        self._spend()
        self._unsynced = [before for before in self._unsynced if before.path != file.path]

    def close(self) -> None:
        pass

    @_one_at_a_time
    def cut_file(self, path: Path, size: int) -> None:
        self._spend()
        data = path.read_bytes()[size:]
        os.truncate(path, size)
        self._unsynced.append(_Before(path, size, data))

    @_one_at_a_time
    def remove_file(self, path: Path) -> None:
        self._spend()
        if path.exists():
            self._removed[path] = path.read_bytes()
            path.unlink()

    @_one_at_a_time
    def sync_folder(self, path: Path) -> None:
        self._spend()
        self._made.clear()
        self._removed.clear()

    def lose(self) -> None:
        """The power cut's damage, after the store over this disk was ended."""
        if not self.loses:
            return
        for path, data in self._removed.items():
            if self.rng.random() < 0.5:
                path.write_bytes(data)
        for path in self._made:
            if path.exists() and self.rng.random() < 0.5:
                path.unlink()
        for before in reversed(self._unsynced):
            if before.path.exists():
                self._undo(before)

    def _undo(self, before: _Before) -> None:
        how = self.rng.random()
        with before.path.open("r+b") as file:
            for at in range(0, len(before.data), SECTOR):
                if how < 0.3 or (how < 0.7 and self.rng.random() < 0.5):
                    file.seek(before.offset + at)
                    file.write(before.data[at : at + SECTOR])

    def _read(self, piece: Piece) -> OSError | None:
        if self.off:
            return _Cut()
        fd = piece.file.acquire()
        try:
            data = os.pread(fd, piece.length, piece.offset)
        finally:
            piece.file.release()
        if len(data) < piece.length:
            return OSError(errno.EIO, "short")
        ctypes.memmove(piece.address, data, piece.length)
        return None

    def _write(self, piece: Piece) -> OSError | None:
        length = piece.length
        try:
            self._spend()
        except _Cut as e:
            if self.left != -1:
                return e
            # The write that was under way gets so far.
            length = self.rng.randrange(piece.length)
        fd = piece.file.acquire()
        try:
            self._unsynced.append(_Before(piece.file.path, piece.offset, os.pread(fd, length, piece.offset)))
            os.pwrite(fd, ctypes.string_at(piece.address, length), piece.offset)
        finally:
            piece.file.release()
        return None if length == piece.length else _Cut()

    def _spend(self) -> None:
        if self.off:
            self.left = -2
            raise _Cut
        self.left -= 1
        if self.left < 0:
            self.off = True
            raise _Cut

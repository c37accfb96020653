"""Open segment files: a bounded number of them, none closed while it is used."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from vllm_pd.kv_offload.block_io.base import BlockIO, OpenFile
from vllm_pd.kv_offload.segments.index import Segment


class _Entry:
    __slots__ = ("file", "leases")

    def __init__(self, file: OpenFile) -> None:
        self.file = file
        self.leases = 0


class OpenFiles:
    """The least recently used one is closed when there are too many. Thread-safe.

    Args:
        io: opens them.
        most: how many are kept open; more while more are used at once.
    """

    def __init__(self, io: BlockIO, most: int) -> None:
        self._io = io
        self._most = most
        self._lock = threading.Lock()
        self._entries: OrderedDict[int, _Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    @contextmanager
    def lease(self, segment: Segment) -> Iterator[OpenFile]:
        """The file, which stays open meanwhile.

        Raises:
            OSError: it cannot be opened.
        """
        entry = self._find(segment.slot)
        if entry is None:
            # Outside the lock: a disk that hangs must not hold up who reads another file.
            entry = self._enter(segment.slot, self._io.open(segment.path))
        try:
            yield entry.file
        finally:
            with self._lock:
                entry.leases -= 1
                self._trim()

    def close(self, segment: Segment) -> None:
        """Its file is not needed any more. Reads under way end as they would."""
        with self._lock:
            entry = self._entries.pop(segment.slot, None)
        if entry is not None:
            entry.file.close()

    def close_all(self) -> None:
        with self._lock:
            entries, self._entries = self._entries, OrderedDict()
        for entry in entries.values():
            entry.file.close()

    def _find(self, slot: int) -> _Entry | None:
        with self._lock:
            entry = self._entries.get(slot)
            if entry is not None:
                entry.leases += 1
                self._entries.move_to_end(slot)
            return entry

    def _enter(self, slot: int, file: OpenFile) -> _Entry:
        with self._lock:
            entry = self._entries.get(slot)
            if entry is None:
                entry = self._entries[slot] = _Entry(file)
                file = entry.file
            entry.leases += 1
            spare = file if file is not entry.file else None
        if spare is not None:
            spare.close()
        return entry

    def _trim(self) -> None:
        """Close what is too much. With the lock held: closing a descriptor that is not written to is quick."""
        for slot in list(self._entries):
            if len(self._entries) <= self._most:
                return
            entry = self._entries[slot]
            if not entry.leases:
                del self._entries[slot]
                entry.file.close()

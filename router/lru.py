"""A cache bounded in bytes, for values whose size the caller knows."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class ByteLru(Generic[K, V]):
    """What was used longest ago goes first. Not thread-safe by itself."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def get(self, key: K) -> V | None:
        """The value; `touch` it if it was of use."""
        found = self._entries.get(key)
        return None if found is None else found[0]

    def touch(self, keys: Iterable[K]) -> None:
        """Mark as used, the last one as used last; all of them are there."""
        move = self._entries.move_to_end
        for key in keys:
            move(key)

    def put(self, key: K, value: V, size: int) -> None:
        """Keep `value`, of about `size` bytes with its key."""
        self._bytes += size - self._entries.pop(key, (None, 0))[1]
        self._entries[key] = (value, size)
        while self._bytes > self._max_bytes:
            self._bytes -= self._entries.popitem(last=False)[1][1]

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    @property
    def size(self) -> int:
        """Bytes that are kept."""
        return self._bytes

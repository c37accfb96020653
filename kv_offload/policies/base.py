"""Which blocks of a full tier go: the interface of an eviction policy, and the machinery that all of them share. Pure.

A policy holds keys, not blocks. Its owner says what happens (a block is stored, a request used these, this one is being
read) and asks whom to evict. Keys of one request are named in the order of its prompt: a block is worth something only
while every block before it is there, so a policy lets the end of a prompt go before its beginning.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Protocol

Key = bytes


class EvictionPolicy(Protocol):
    """Which of at most `capacity` keys go first. Not thread-safe; every call costs amortized constant time per key."""

    capacity: int

    def __len__(self) -> int: ...

    def __contains__(self, key: Key) -> bool: ...

    def missed(self, keys: Sequence[Key]) -> None:
        """A request computed these, in prompt order, because they were not here; most are inserted next."""

    def insert(self, key: Key) -> None:
        """A new block, pinned: its bytes are not there yet. The caller has made room."""

    def accessed(self, chain: Sequence[Key], reused: Collection[Key], loaded: Collection[Key] = ()) -> None:
        """A request has ended. Called once for each.

        Args:
            chain: what it saw of this tier, in prompt order; keys that have gone since are ignored.
            reused: those of them that were here before it came.
            loaded: those that it read from here; what it reused besides was on the GPU as well.
        """

    def pin(self, key: Key) -> None:
        """The block is in use and must stay. Pinning twice is pinning once; nothing happens if it is not here."""

    def unpin(self, key: Key) -> None:
        """The block may go again; nothing happens if it was not pinned or is not here."""

    def remove(self, key: Key) -> None:
        """Forget a block that turned out not to be here, pinned or not: a write has failed. Raises KeyError."""

    def evict(self, count: int, protected: Collection[Key] = ()) -> list[Key] | None:
        """Let `count` blocks go, none of them pinned or protected.

        Returns:
            Their keys, or None if there are not so many; then nothing has changed.
        """

    def clear(self) -> None:
        """Forget all blocks, pinned ones too, and everything learned."""


class Queue:
    """Keys in the order in which they may go, oldest first.

    A pinned key that a search meets at the old end is set aside until it is unpinned, and then is the oldest again: no
    search passes it twice.
    """

    __slots__ = ("_aside", "_order", "_pinned", "_set_aside")

    def __init__(self, pinned: set[Key]) -> None:
        """`pinned` is the policy's own set, which it changes."""
        self._pinned = pinned
        self._order: OrderedDict[Key, None] = OrderedDict()
        self._aside: dict[Key, int] = {}
        self._set_aside = 0

    def __len__(self) -> int:
        return len(self._order) + len(self._aside)

    def add(self, key: Key) -> None:
        """As the youngest. The key must not be here."""
        self._order[key] = None

    def discard(self, key: Key) -> None:
        if key in self._order:
            del self._order[key]
        else:
            self._aside.pop(key, None)

    def oldest(self) -> Key | None:
        """The oldest that is not pinned, which stays; None if there is none."""
        order, pinned = self._order, self._pinned
        while order:
            key = next(iter(order))
            if key not in pinned:
                return key
            del order[key]
            self._set_aside += 1
            self._aside[key] = self._set_aside
        return None

    def turn(self, key: Key) -> int:
        """When a key was set aside: what is put back last was set aside first. 0 if it was not."""
        return self._aside.get(key, 0)

    def put_back(self, key: Key) -> None:
        """A key that is no longer pinned. Nothing happens if it was not set aside."""
        if self._aside.pop(key, None) is not None:
            self._order[key] = None
            self._order.move_to_end(key, last=False)

    def clear(self) -> None:
        self._order.clear()
        self._aside.clear()


class Ghosts:
    """The last `capacity` keys that were noted; older ones are forgotten."""

    __slots__ = ("_keys", "capacity")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._keys: OrderedDict[Key, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: Key) -> bool:
        return key in self._keys

    def note(self, key: Key) -> None:
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > self.capacity:
            self._keys.popitem(last=False)

    def discard(self, key: Key) -> None:
        self._keys.pop(key, None)

    def clear(self) -> None:
        self._keys.clear()


class QueuePolicy(ABC):
    """An `EvictionPolicy` that keeps each key in one of several queues. A subclass says in which, and who goes next."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._pinned: set[Key] = set()
        self._home: dict[Key, Queue] = {}

    def __len__(self) -> int:
        return len(self._home)

    def __contains__(self, key: Key) -> bool:
        return key in self._home

    def missed(self, keys: Sequence[Key]) -> None:
        return None

    def insert(self, key: Key) -> None:
        self._pinned.add(key)
        self._place(key, self._queue_of_new(key))

    @abstractmethod
    def accessed(self, chain: Sequence[Key], reused: Collection[Key], loaded: Collection[Key] = ()) -> None: ...

    def pin(self, key: Key) -> None:
        if key in self._home:
            self._pinned.add(key)

    def unpin(self, key: Key) -> None:
        self._pinned.discard(key)
        queue = self._home.get(key)
        if queue is not None:
            queue.put_back(key)

    def remove(self, key: Key) -> None:
        self._home.pop(key).discard(key)
        self._pinned.discard(key)
        self._forget(key)

    def evict(self, count: int, protected: Collection[Key] = ()) -> list[Key] | None:
        guarded = [key for key in protected if key in self._home and key not in self._pinned]
        if count > len(self._home) - len(self._pinned) - len(guarded):
            return None
        self._pinned.update(guarded)
        victims = [self._evict_one() for _ in range(count)]
        for key in sorted(guarded, key=lambda key: self._home[key].turn(key), reverse=True):
            self.unpin(key)
        return victims

    def clear(self) -> None:
        for queue in self._queues():
            queue.clear()
        self._home.clear()
        self._pinned.clear()

    @abstractmethod
    def _queues(self) -> Collection[Queue]:
        """All of them."""

    @abstractmethod
    def _queue_of_new(self, key: Key) -> Queue:
        """Where an inserted key begins."""

    @abstractmethod
    def _victim(self) -> Key:
        """Who goes next. Called only while some key is not pinned."""

    def _forget(self, key: Key) -> None:
        """The key left without an eviction: drop what is kept about it elsewhere."""
        return None

    def _evict_one(self) -> Key:
        key = self._victim()
        self._home.pop(key).discard(key)
        return key

    def _place(self, key: Key, queue: Queue) -> None:
        """Make a key the youngest of a queue, wherever it was."""
        home = self._home.get(key)
        if home is not None:
            home.discard(key)
        self._home[key] = queue
        queue.add(key)

"""A `get` on its way, and the queue of those that wait for a reader."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from vllm_pd.kv_offload.segments.index import Index, Place
from vllm_pd.kv_offload.segments.outcome import Finished, Reason


@dataclass(frozen=True, slots=True)
class Part:
    """What one reader delivers at once: numbers of keys of the load, in the order they lie on the disk."""

    load: Load
    numbers: list[int]

    def places(self) -> list[Place]:
        return [place for n in self.numbers if (place := self.load.places[n]) is not None]


class Load:
    """Blocks asked for by one ticket.

    `lock` is held while targets are written to, and to end the load: what holds it decides whether a block is delivered
    or late. After the end no target is touched, and none is referred to.

    Args:
        places: where each key is; None for those that are not stored.
        deadline: by the clock; afterwards the load is ended as late.
        started: now, by the same clock.
    """

    def __init__(
        self,
        ticket: int,
        keys: Sequence[bytes],
        places: Sequence[Place | None],
        targets: Sequence[memoryview],
        deadline: float,
        started: float,
    ) -> None:
        self.ticket = ticket
        self.keys = keys
        self.places = places
        self.targets: Sequence[memoryview] = targets
        self.deadline = deadline
        self.started = started
        self.began: float | None = None
        self.lock = threading.Lock()
        self.ended = False
        self.failed = {key: Reason.ABSENT for key, place in zip(keys, places, strict=True) if place is None}
        self.delivered: set[int] = set()
        self.waiting: deque[Part] = deque()
        self.parts_left = 0

    def split(self, most: int) -> None:
        """Into parts of at most `most` blocks, neighbours on the disk together."""
        there = [(place[0].id, place[1], n) for n, place in enumerate(self.places) if place is not None]
        numbers = [n for _, _, n in sorted(there)]
        self.waiting.extend(Part(self, numbers[i : i + most]) for i in range(0, len(numbers), most))
        self.parts_left = len(self.waiting)

    def result(self, block_bytes: int, now: float) -> Finished:
        """Of an ended load; the caller is who ended it."""
        ok = tuple(key for n, key in enumerate(self.keys) if n in self.delivered)
        began = now if self.began is None else self.began
        return Finished(
            self.ticket,
            ok,
            self.failed,
            len(self.delivered) * block_bytes,
            now - self.started,
            began - self.started,
            is_load=True,
        )


class LoadQueue:
    """Loads that are not ended, and which of their parts is next: first come, first served. Thread-safe.

    Args:
        end: takes a load that was just ended, with whatever lock it needs free.
        index: where places of parts that are not read any more are unpinned.
    """

    def __init__(self, index: Index, end: Callable[[Load], None], clock: Callable[[], float]) -> None:
        self._index = index
        self._end = end
        self._clock = clock
        self._changed = threading.Condition()
        self._waiting: deque[Load] = deque()
        self._blocks_waiting = 0
        self._loads: dict[int, Load] = {}
        self._closed = False

    @property
    def blocks(self) -> int:
        """Asked for and not delivered or failed yet."""
        with self._changed:
            loads = list(self._loads.values())
        return sum(len(load.keys) - len(load.failed) - len(load.delivered) for load in loads)

    def add(self, load: Load) -> bool:
        """False when closed: nothing is done with it."""
        with self._changed:
            if self._closed:
                return False
            self._loads[id(load)] = load
            self._waiting.append(load)
            self._blocks_waiting += sum(len(part.numbers) for part in load.waiting)
            self._changed.notify(len(load.waiting))
        return True

    def take(self, most: int, takers: int) -> list[Part]:
        """The next parts, waiting for one; none when closed.

        Args:
            most: blocks; no part has more.
            takers: who share what waits: each takes half of its share, so that none is left with much at the end.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            share = min(most, self._blocks_waiting // (2 * takers))
            parts: list[Part] = []
            while self._waiting:
                load = self._waiting[0]
                share -= len(load.waiting[0].numbers)
                if parts and share < 0:
                    break
                part = load.waiting.popleft()
                parts.append(part)
                self._blocks_waiting -= len(part.numbers)
                if not load.waiting:
                    self._waiting.popleft()
                if load.began is None:
                    load.began = self._clock()
            return parts

    def part_done(self, load: Load) -> None:
        """A part was delivered or failed; with its last part a load ends."""
        with load.lock:
            load.parts_left -= 1
            last = not load.parts_left and not load.ended
            if last:
                load.ended = True
        if last:
            self._finish(load)

    def end_late(self, now: float) -> None:
        """End loads whose deadline is over. One whose target is being written to this instant is left for next time."""
        with self._changed:
            late = [load for load in self._loads.values() if load.deadline <= now]
        self._end_all(late, Reason.LATE, blocking=False)

    def end_everything(self, reason: Reason) -> None:
        """End all loads, waiting where a target is being written to."""
        with self._changed:
            loads = list(self._loads.values())
        self._end_all(loads, reason, blocking=True)

    def close(self) -> None:
        """Readers get None once nothing waits; nothing more is added."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _end_all(self, loads: Iterable[Load], reason: Reason, *, blocking: bool) -> None:
        for load in loads:
            if not load.lock.acquire(blocking=blocking):
                continue
            try:
                if load.ended:
                    continue
                load.ended = True
                load.failed.update(
                    (key, reason)
                    for n, key in enumerate(load.keys)
                    if n not in load.delivered and key not in load.failed
                )
            finally:
                load.lock.release()
            self._finish(load)

    def _finish(self, load: Load) -> None:
        load.targets = ()
        with self._changed:
            self._loads.pop(id(load), None)
            unread = list(load.waiting)
            load.waiting.clear()
            if unread:
                self._waiting.remove(load)
                self._blocks_waiting -= sum(len(part.numbers) for part in unread)
        for part in unread:
            self._index.unpin(part.places())
        self._end(load)

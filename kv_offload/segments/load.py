"""A `get` on its way, and the queue of those that wait for a reader."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from vllm_pd.kv_offload.segments.gate import Gate
from vllm_pd.kv_offload.segments.index import Group, Index, Located, Place
from vllm_pd.kv_offload.segments.outcome import Finished, Reason
from vllm_pd.kv_offload.segments.rows import Rows

TURN_S = 0.05
"""How long a reader waits for its turn."""

COPY_S = 1e-4
"""About what a block's copy takes."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What one reader delivers at once.

    Attributes:
        positions: of its keys in the load, in the order in which the blocks lie on the disk.
        groups: where they lie.
    """

    load: Load
    positions: list[int]
    groups: list[Group]

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def keys(self) -> list[bytes]:
        return [self.load.keys[position] for position in self.positions]

    @property
    def targets(self) -> list[int]:
        return [self.load.targets[position] for position in self.positions]

    def place(self, number: int) -> Place:
        """Of its key `number`."""
        for segment, numbers in self.groups:
            if number < len(numbers):
                return segment, numbers[number]
            number -= len(numbers)
        raise IndexError(number)


class Load:
    """Blocks asked for by one ticket.

    `lock` is held to deliver blocks and to end the load: what holds it decides whether a block is delivered or late.
    Targets are written to inside `gate`. After the end no target is touched, and none is referred to.

    Args:
        located: where each key is.
        rows: what keeps the targets' memory.
        targets: address of each.
        deadline: by the clock; afterwards the load is ended as late.
        started: now, by the same clock.
    """

    def __init__(
        self,
        ticket: int,
        keys: Sequence[bytes],
        located: Located,
        rows: Rows,
        targets: Sequence[int],
        deadline: float,
        started: float,
    ) -> None:
        self.ticket = ticket
        self.keys = keys
        self.targets = targets
        self.deadline = deadline
        self.started = started
        self.began: float | None = None
        self.lock = threading.Lock()
        self.gate = Gate()
        self.ended = False
        self.failed = {keys[position]: Reason.ABSENT for position in located.absent}
        self.delivered: set[int] = set()
        self.waiting: deque[Part] = deque()
        self.parts_left = 0
        self._located = located
        self._rows: Rows | None = rows

    def split(self, most: int) -> None:
        """Into parts of at most `most` blocks, neighbours on the disk together."""
        for first in range(0, len(self._located.positions), most):
            self.waiting.append(Part(self, *self._located.part(first, first + most)))
        self.parts_left = len(self.waiting)

    def fail(self, positions: Iterable[int], reason: Reason) -> None:
        """Unless they were delivered, or failed before. With the lock held."""
        for position in positions:
            if position not in self.delivered:
                self.failed.setdefault(self.keys[position], reason)

    def end(self, reason: Reason) -> bool:
        """End it with what is not delivered failed; False, and to be asked again, while a target is being written to, a
        matter of one block's copy. With the lock held, of a load that is not ended."""
        if not self.gate.close():
            return False
        self.ended = True
        self.fail(range(len(self.keys)), reason)
        return True

    def let_go(self) -> None:
        """Of the targets' memory."""
        self._rows = None

    def result(self, block_bytes: int, now: float) -> Finished:
        """Of an ended load; the caller is who ended it."""
        all_of_them = len(self.delivered) == len(self.keys)
        ok = tuple(key for n, key in enumerate(self.keys) if all_of_them or n in self.delivered)
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
        readers: who share what waits; half of them read at a time.
        index: where places of parts that are not read any more are unpinned.
        end: takes a load that was just ended, with whatever lock it needs free.
    """

    def __init__(self, readers: int, index: Index, end: Callable[[Load], None], clock: Callable[[], float]) -> None:
        self._readers = readers
        self._turns = max(1, readers // 2)
        self._reading = 0
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
            self._blocks_waiting += sum(len(part) for part in load.waiting)
            self._changed.notify(len(load.waiting))
        return True

    def take(self, most: int) -> list[Part]:
        """The next parts, waiting for one, and for a turn to read, which `read_over` ends; none when closed.

        Not all read at once: they would end at once too, and the disk would wait while all check what they read. That
        holds for those who do read at once: whoever begins while nobody else reads takes half, to end before the next.

        Args:
            most: blocks; no part has more.
        """
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return []
                # Those whose turn lasts this long hang on the disk, and it may have another file.
                self._changed.wait_for(lambda: self._reading < self._turns or not self._waiting, TURN_S)
                if self._waiting:
                    break
            share = min(most if self._reading else most // 2, self._blocks_waiting // self._readers)
            self._reading += 1
            parts: list[Part] = []
            while self._waiting:
                load = self._waiting[0]
                share -= len(load.waiting[0])
                if parts and share < 0:
                    break
                part = load.waiting.popleft()
                parts.append(part)
                self._blocks_waiting -= len(part)
                if not load.waiting:
                    self._waiting.popleft()
                if load.began is None:
                    load.began = self._clock()
            return parts

    def read_over(self) -> None:
        """What was taken was read, or cannot be."""
        with self._changed:
            self._reading -= 1
            self._changed.notify()

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
                while not (ended := load.end(reason)) and blocking:
                    time.sleep(COPY_S)
            finally:
                load.lock.release()
            if ended:
                self._finish(load)

    def _finish(self, load: Load) -> None:
        load.let_go()
        with self._changed:
            self._loads.pop(id(load), None)
            unread = list(load.waiting)
            load.waiting.clear()
            if unread:
                self._waiting.remove(load)
                self._blocks_waiting -= sum(len(part) for part in unread)
        for part in unread:
            self._index.unpin(part.groups)
        self._end(load)

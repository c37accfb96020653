"""Changes on their way to the index: at once, in batches, within bounds, and announced anew where the store forgot."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.unit.agent.test_block_truth import block, key, removed, stored
from vllm_pd.agent.block_truth import BlockTruth
from vllm_pd.agent.index_feeder import FeedLimits, IndexFeeder
from vllm_pd.background import end_tasks
from vllm_pd.block_hash import KEY_BYTES
from vllm_pd.errors import IndexLost, StoreError

DEADLINE_S = 20.0
QUICK = FeedLimits(batch_blocks=8, waiting_blocks=100, gather_s=(0.001, 0.005), announce_s=0.01, backoff_s=(0.01, 0.05))


class Store:
    """One cache's writer, whose store can be held up, fail and forget; it refuses what the contract forbids."""

    def __init__(self) -> None:
        self.held: dict[bytes, int] = {}
        self.calls: list[str] = []
        self.written: list[int] = []
        self.open = asyncio.Event()
        self.open.set()
        self.failing: Exception | None = None
        self._known = False
        self._busy = False

    def forget(self) -> None:
        self.held.clear()
        self._known = False

    async def write(self, changed: Mapping[int, bytes]) -> None:
        await self._call("write")
        if not self._known:
            raise IndexLost("empty")
        self._known = False
        await self._answer()
        self.written.append(sum(map(len, changed.values())) // KEY_BYTES)
        self._apply(changed)
        self._known = True

    async def replace(self, held: Mapping[int, bytes]) -> None:
        await self._call("replace")
        self._known = False
        await self._answer()
        self.held.clear()
        self._apply(held)
        self._known = True

    async def renew(self, ttl_ms: int) -> None:
        await self._call("renew")
        await self._answer()
        if not self._known:
            raise IndexLost("empty")

    async def remove(self) -> None:
        self.held.clear()

    async def _call(self, name: str) -> None:
        assert not self._busy, "one caller at a time"
        self.calls.append(name)

    async def _answer(self) -> None:
        self._busy = True
        try:
            await self.open.wait()
            await asyncio.sleep(0)
            if self.failing is not None:
                raise self.failing
        finally:
            self._busy = False

    def _apply(self, changed: Mapping[int, bytes]) -> None:
        for bits, packed in changed.items():
            for at in range(0, len(packed), KEY_BYTES):
                self.held.pop(packed[at : at + KEY_BYTES], None)
                if bits:
                    self.held[packed[at : at + KEY_BYTES]] = bits


class Bench:
    def __init__(self, limits: FeedLimits, renew_s: float) -> None:
        self.store = Store()
        self.truth = BlockTruth()
        self.feeder = IndexFeeder(self.store, self.truth, ttl_ms=1000, renew_s=renew_s, name="w rank 0", limits=limits)

    def events(self, *events: Any) -> None:
        self.feeder.push(self.truth.apply(events))

    async def settled(self) -> None:
        await self.until(lambda: self.store.held == self.expected() and self.feeder.waiting in (0, len(self.truth)))

    def expected(self) -> dict[bytes, int]:
        return {
            packed[at : at + KEY_BYTES]: bits
            for bits, packed in self.truth.held().items()
            for at in range(0, len(packed), KEY_BYTES)
        }

    async def until(self, condition: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not condition():  # noqa: ASYNC110 (the condition is somebody else's state)
                    await asyncio.sleep(0.002)
        except TimeoutError:
            pytest.fail(f"it did not happen in time: {self.store.calls[-20:]}, {self.feeder.stats}")


@asynccontextmanager
async def bench(limits: FeedLimits = QUICK, renew_s: float = 1000.0, allowed: bool = True) -> AsyncIterator[Bench]:
    made = Bench(limits, renew_s)
    made.feeder.allow(allowed)
    task = asyncio.create_task(made.feeder.run())
    try:
        if allowed:
            await made.until(lambda: made.feeder.stats.announcements == 1)
        yield made
    finally:
        await end_tasks((task,))


async def test_the_first_write_announces_and_the_next_say_what_changed() -> None:
    async with bench() as b:
        b.events(stored(1, 2))
        await b.settled()
        b.events(stored(3), removed(1))
        await b.settled()
        assert b.store.held == {key(2): 1, key(3): 1}
        assert b.store.calls == ["replace", "write", "write"] and b.store.written == [2, 2]


async def test_changes_of_one_block_that_wait_together_are_written_once() -> None:
    async with bench() as b:
        b.store.open.clear()
        b.events(stored(1))
        await b.until(lambda: b.store.calls[-1] == "write")
        for _ in range(10):
            b.events(stored(2, medium="CPU"), removed(1), stored(1))
            b.events(removed(2, medium="CPU"))
        b.store.open.set()
        await b.settled()
        assert b.store.held == {key(1): 1}
        assert sum(b.store.written) <= 3


async def test_a_write_has_at_most_so_many_blocks() -> None:
    async with bench() as b:
        b.events(stored(*range(50)))
        await b.settled()
        assert max(b.store.written) == 8 and sum(b.store.written) == 50
        assert b.feeder.stats.blocks == 50 and b.feeder.stats.batches == len(b.store.written)


@pytest.mark.parametrize(("took", "pause"), [(0.0, 0.002), (0.003, 0.012), (0.5, 0.025)])
async def test_the_longer_a_write_takes_the_longer_the_next_changes_gather(took: float, pause: float) -> None:
    now = 100.0

    class Slow(Store):
        async def write(self, changed: Mapping[int, bytes]) -> None:
            nonlocal now
            await super().write(changed)
            now += took

    truth = BlockTruth()
    limits = FeedLimits(batch_blocks=8, gather_s=(0.002, 0.025))
    feeder = IndexFeeder(Slow(), truth, ttl_ms=1000, renew_s=1000.0, name="w rank 0", limits=limits, clock=lambda: now)
    feeder.allow(True)
    await feeder._step()
    feeder.push(truth.apply([stored(1)]))
    assert feeder._due_in() <= 0, "nothing was written just before"
    await feeder._step()
    feeder.push(truth.apply([stored(2)]))
    assert feeder._due_in() == pytest.approx(pause)
    feeder.push(truth.apply([stored(*range(3, 10))]))
    assert feeder._due_in() <= 0, "a full write does not wait"


async def test_what_waits_is_bounded_and_the_truth_is_announced_instead() -> None:
    async with bench() as b:
        b.store.open.clear()
        b.events(stored(0))
        await b.until(lambda: b.store.calls[-1] == "write")
        for n in range(1, 1000):
            b.events(stored(n), removed(n - 1))
            assert len(b.feeder._waiting) <= 100
        b.store.open.set()
        await b.settled()
        assert b.store.held == {key(999): 1}
        assert b.store.calls[-1] == "replace" and b.feeder.stats.overflows == 1


@pytest.mark.parametrize("error", [StoreError("away"), OSError("unforeseen")])
async def test_a_store_that_fails_is_tried_until_it_has_everything(error: Exception) -> None:
    async with bench() as b:
        b.store.failing = error
        b.events(stored(1))
        await b.until(lambda: b.feeder.stats.errors >= 3)
        b.events(stored(2), removed(1))
        b.store.forget()
        b.store.failing = None
        await b.settled()
        assert b.store.held == {key(2): 1}
        assert set(b.store.calls[2:]) == {"replace"}, "after a failure nobody knows what the store has"


async def test_a_store_that_forgot_is_noticed_at_the_next_change_and_at_the_next_renewal() -> None:
    async with bench(renew_s=0.05) as b:
        b.events(stored(1))
        await b.settled()
        b.store.forget()
        b.events(stored(2))
        await b.settled()
        b.store.forget()
        await b.settled()
        assert b.store.held == {key(1): 1, key(2): 1}


async def test_a_hint_that_the_store_may_be_empty_is_followed_at_once() -> None:
    async with bench() as b:
        b.events(stored(1))
        await b.settled()
        b.store.forget()
        b.feeder.check()
        await b.settled()
        assert b.store.calls == ["replace", "write", "renew", "replace"]


async def test_nothing_is_written_while_another_process_has_our_place() -> None:
    async with bench(allowed=False, renew_s=0.02) as b:
        b.events(stored(1))
        await asyncio.sleep(0.1)
        assert b.store.calls == []
        b.feeder.allow(True)
        await b.settled()
        b.feeder.allow(False)
        calls = len(b.store.calls)
        b.events(stored(2))
        await asyncio.sleep(0.1)
        assert b.store.calls[calls:] == [] and b.store.held == {key(1): 1}
        b.feeder.allow(True)
        await b.settled()
        assert b.store.held == {key(1): 1, key(2): 1}


async def test_a_reset_is_one_announcement() -> None:
    async with bench() as b:
        b.events(stored(*range(40)))
        await b.settled()
        before = len(b.store.calls)
        b.feeder.push(b.truth.forget())
        b.events(stored(7))
        await b.settled()
        assert b.store.calls[before] == "replace" and b.store.held == {key(7): 1}


def test_keys_are_the_first_bytes_of_hashes() -> None:
    assert block(1)[:KEY_BYTES] == key(1)

"""Results of a router's jobs: who hears of them, twice, too late or never."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from vllm_pd.errors import StoreError
from vllm_pd.router import queue_results
from vllm_pd.router.queue_results import LOST_S, REMEMBERED_S, JobResults
from vllm_pd.state import MemoryPrefillQueue, MemoryStore, PoolId
from vllm_pd.state.base import Epoch, WorkerId
from vllm_pd.state.prefill_queue import Claimant, JobId, JobResult, PrefillJob

POOL = PoolId("pool")
ME = "router"
A = Claimant(WorkerId("a:1"), Epoch(1))


class MovedClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class FlakyQueue(MemoryPrefillQueue):
    """Fails while `problem` is set; what was named before an error is named again."""

    def __init__(self) -> None:
        super().__init__("test", MemoryStore())
        self.problem = ""
        self.again: list[tuple[JobId, JobResult]] = []

    async def results(self, pool: PoolId, router: str, wait_ms: int = 0) -> Sequence[tuple[JobId, JobResult]]:
        if self.problem:
            raise StoreError(self.problem)
        again, self.again = self.again, []
        return [*again, *await super().results(pool, router)]


class Bench:
    def __init__(self) -> None:
        self.clock = MovedClock()
        self.queue = FlakyQueue()
        self.orphans: list[tuple[str, JobResult]] = []
        self.jobs = JobResults(
            self.queue, POOL, ME, lambda hold, result: self.orphans.append((hold, result)), self.clock
        )

    async def put(self, name: str) -> queue_results.Expected:
        expected = self.jobs.expect(JobId(name), f"hold-{name}")
        await self.queue.put(POOL, PrefillJob(JobId(name), 1, b"", router=ME), 60_000)
        expected.queued = True
        return expected

    async def finish(self, *names: str) -> None:
        await self.queue.announce_router(POOL, ME, 60_000)
        for _ in names:
            claim = await self.queue.claim(POOL, A, fits=-1)
            assert claim is not None
            assert claim.job.id in names
            await self.queue.ack(POOL, claim, claim.job.id.encode())


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(queue_results, "RETRY_S", 0.0)
    return Bench()


async def test_each_job_gets_its_own_result(bench: Bench) -> None:
    one, two = await bench.put("one"), await bench.put("two")
    await bench.finish("one", "two")
    await bench.jobs.refresh()
    assert one.result.result() == JobResult(b"one", worker="a:1")
    assert two.result.result() == JobResult(b"two", worker="a:1")


async def test_result_that_comes_twice_is_heard_once(bench: Bench) -> None:
    """Also after its waiter has gone on: a decode worker may be reading the blocks."""
    one = await bench.put("one")
    await bench.finish("one")
    await bench.jobs.refresh()
    result = one.result.result()
    assert result is not None
    bench.queue.again = [(one.id, result)]
    await bench.jobs.refresh()
    bench.jobs.done(one, abandoned=False)
    bench.queue.again = [(one.id, result)]
    await bench.jobs.refresh()
    assert bench.orphans == []


async def test_result_of_an_abandoned_job_is_an_orphan_once(bench: Bench) -> None:
    one = await bench.put("one")
    bench.jobs.done(one, abandoned=True)
    await bench.finish("one")
    await bench.jobs.refresh()
    assert bench.orphans == [("hold-one", JobResult(b"one", worker="a:1"))]
    bench.queue.again = [(one.id, bench.orphans[0][1])]
    await bench.jobs.refresh()
    assert len(bench.orphans) == 1


async def test_abandoned_jobs_are_remembered_for_a_while(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_results, "MOST_REMEMBERED", 3)
    for name in ("one", "two", "three", "four"):
        bench.jobs.done(bench.jobs.expect(JobId(name), name), abandoned=True)
    result = JobResult(b"", worker="a:1")
    bench.queue.again = [(JobId("one"), result), (JobId("two"), result)]
    await bench.jobs.refresh()
    assert [hold for hold, _ in bench.orphans] == ["two"]
    bench.clock.now += REMEMBERED_S + 1
    bench.jobs.done(bench.jobs.expect(JobId("five"), "five"), abandoned=True)
    bench.jobs.done(bench.jobs.expect(JobId("six"), "six"), abandoned=True)
    bench.queue.again = [(JobId("four"), result), (JobId("six"), result)]
    await bench.jobs.refresh()
    assert [hold for hold, _ in bench.orphans] == ["two", "six"]


async def test_store_that_fails_for_a_moment_costs_nothing(bench: Bench) -> None:
    one = await bench.put("one")
    bench.queue.problem = "gone"
    bench.clock.now += LOST_S / 2
    await bench.jobs.refresh()
    assert not one.result.done()
    bench.queue.problem = ""
    await bench.finish("one")
    await bench.jobs.refresh()
    assert one.result.result() == JobResult(b"one", worker="a:1")
    assert bench.jobs.problem == ""


async def test_store_that_stays_away_is_waited_for_by_nobody(bench: Bench) -> None:
    one = await bench.put("one")
    bench.queue.problem = "gone"
    bench.clock.now += LOST_S
    await bench.jobs.refresh()
    assert one.result.result() is None
    assert bench.jobs.problem == "gone"


async def test_job_that_the_store_forgot_is_not_waited_for(bench: Bench) -> None:
    """One that is still there is, as is one whose end came just then, and one that is being put."""
    forgotten, ended = await bench.put("forgotten"), await bench.put("ended")
    await bench.queue.cancel(POOL, forgotten.id)
    await bench.finish("ended")
    there = await bench.put("there")
    unsent = bench.jobs.expect(JobId("unsent"), "")
    bench.queue.problem = "gone"
    await bench.jobs.refresh()
    bench.queue.problem = ""
    await bench.jobs.refresh()
    assert forgotten.result.result() is None
    assert ended.result.result() == JobResult(b"ended", worker="a:1")
    assert not there.result.done()
    assert not unsent.result.done()


async def test_jobs_that_nobody_has_are_lost_where_nobody_claims(bench: Bench) -> None:
    claimed = await bench.put("claimed")
    assert await bench.queue.claim(POOL, A, fits=-1)
    waiting = await bench.put("waiting")
    await bench.jobs.lose_unclaimed()
    assert waiting.result.result() is None
    assert not claimed.result.done()


async def test_jobs_that_take_long_are_named(bench: Bench) -> None:
    one = await bench.put("one")
    bench.clock.now += 5.0
    await bench.put("two")
    bench.jobs.expect(JobId("unsent"), "")
    assert bench.jobs.overdue(5.0) == [one.id]

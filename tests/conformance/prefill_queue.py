"""What every `PrefillQueue` must do. A test module subclasses it; `harness` is a fixture."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Sequence

import pytest

from tests.conformance.harness import Harness
from tests.conformance.registry import OTHER_POOL, POOL
from vllm_pd.errors import QueueFull
from vllm_pd.state import (
    Claim,
    Claimant,
    DeadJob,
    Epoch,
    JobId,
    JobResult,
    PrefillJob,
    PrefillQueue,
    QueueDepth,
    QueueLimits,
    WorkerId,
)

POOL_ID = POOL.id
TTL_MS = 60_000
LIMITS = QueueLimits(length=5, attempts=2, visibility_ms=60_000, patience_ms=0)
A, B, C = WorkerId("a:1"), WorkerId("[::1]:2"), WorkerId("c:3")
ROUTER = "router-1"


def job(name: str, tokens: int = 100, worker: WorkerId | None = None, order: int = 0, router: str = "") -> PrefillJob:
    return PrefillJob(JobId(name), tokens, b"\x00payload of " + name.encode(), worker, order, router)


def waited_for(name: str, tokens: int = 100, worker: WorkerId | None = None) -> PrefillJob:
    """A job for whose result `ROUTER` waits."""
    return job(name, tokens, worker, router=ROUTER)


def at(worker: WorkerId, epoch: int = 1) -> Claimant:
    return Claimant(worker, Epoch(epoch))


async def put(queue: PrefillQueue, *jobs: PrefillJob) -> None:
    for each in jobs:
        assert await queue.put(POOL_ID, each, TTL_MS)


async def claim(queue: PrefillQueue, worker: WorkerId, steal_from: WorkerId | None = None, epoch: int = 1) -> Claim:
    claim = await queue.claim(POOL_ID, at(worker, epoch), fits=-1, steal_from=steal_from)
    assert claim is not None
    return claim


async def claims(queue: PrefillQueue, worker: WorkerId, count: int, steal_from: WorkerId | None = None) -> list[Claim]:
    return [await claim(queue, worker, steal_from) for _ in range(count)]


def names(claims: Sequence[Claim]) -> list[str]:
    return [claim.job.id for claim in claims]


async def nothing(queue: PrefillQueue, worker: WorkerId, fits: int = -1, epoch: int = 1) -> bool:
    return await queue.claim(POOL_ID, at(worker, epoch), fits=fits) is None


class PrefillQueueConformance:
    """Inherit where there is a fixture `harness`."""

    async def test_a_job_goes_to_one_worker_and_its_result_to_who_waits(self, harness: Harness) -> None:
        router, other = harness.prefill_queue(LIMITS), harness.prefill_queue(LIMITS)
        assert await nothing(other, A)
        await put(router, waited_for("one"))
        claimed = await claim(other, A)
        assert (claimed.job, claimed.claimant, claimed.attempt) == (waited_for("one"), at(A), 1)
        assert await nothing(other, B)
        assert await router.results(POOL_ID, ROUTER) == []
        waiting = asyncio.create_task(router.results(POOL_ID, ROUTER, 20_000))
        await asyncio.sleep(0.02)
        assert await other.ack(POOL_ID, claimed, b"\x00blocks")
        assert await waiting == [("one", JobResult(b"\x00blocks", worker=A))]
        assert await router.results(POOL_ID, ROUTER) == []
        assert await nothing(other, A)

    async def test_results_go_to_their_router_at_most_64_a_call(self, harness: Harness) -> None:
        queue = harness.prefill_queue(dataclasses.replace(LIMITS, length=200))
        await put(queue, *(waited_for(f"job{n}") for n in range(70)), job("other", router="router-2"), job("nobodys"))
        for claimed in await claims(queue, A, 72):
            assert await queue.ack(POOL_ID, claimed, claimed.job.id.encode())
        first, second = await queue.results(POOL_ID, ROUTER), await queue.results(POOL_ID, ROUTER, 20_000)
        assert (len(first), len(second)) == (64, 6)
        assert [*first, *second] == [(f"job{n}", JobResult(b"job%d" % n, worker=A)) for n in range(70)]
        assert await queue.results(POOL_ID, "router-2") == [("other", JobResult(b"other", worker=A))]
        assert await queue.results(OTHER_POOL.id, ROUTER) == []

    async def test_own_jobs_come_first_then_shared_ones_then_another_workers(self, harness: Harness) -> None:
        queue = harness.prefill_queue(LIMITS)
        await put(queue, job("s1"), job("b1", worker=B), job("a1", worker=A), job("s2"), job("a2", worker=A))
        assert names(await claims(queue, A, 5, steal_from=B)) == ["a1", "a2", "s1", "s2", "b1"]
        assert await queue.claim(POOL_ID, at(A), fits=-1, steal_from=B) is None
        await put(queue, job("b2", worker=B))
        assert await nothing(queue, A)
        assert (await claim(queue, C, steal_from=B)).job == job("b2", worker=B)

    async def test_the_smallest_order_comes_first_over_own_and_shared_jobs(self, harness: Harness) -> None:
        queue = harness.prefill_queue(dataclasses.replace(LIMITS, length=20))
        turn = 1_764_000_000_000
        step = 1 << 44
        await put(
            queue,
            job("own", worker=A, order=turn + 2),
            job("last", order=(step << 18) + turn),
            job("last but one", order=(step << 18) + turn - 1),
            job("later", order=turn + 3),
            job("first", order=turn - (step << 18)),
            job("early", order=turn),
            job("b", worker=B, order=turn - (step << 18) - 1),
        )
        expected = ["first", "early", "own", "later", "last but one", "last", "b"]
        claimed = await claims(queue, A, 7, steal_from=B)
        assert names(claimed) == expected
        assert claimed[0].job.order == turn - (step << 18)

    async def test_the_oldest_64_waiting_jobs_are_looked_at(self, harness: Harness) -> None:
        queue = harness.prefill_queue(dataclasses.replace(LIMITS, length=100))
        await put(queue, *(job(f"job{n}", order=1000 - n) for n in range(70)))
        assert names(await claims(queue, A, 3)) == ["job63", "job64", "job65"]

    async def test_only_a_job_that_fits_is_claimed(self, harness: Harness) -> None:
        queue = harness.prefill_queue(dataclasses.replace(LIMITS, patience_ms=60_000))
        await put(queue, job("long", 1000), job("own", 500, A), job("short", 10))
        assert await nothing(queue, B, fits=9)
        assert await nothing(queue, B, fits=0)
        for who, fits, expected in ((B, 999, "short"), (A, 999, "own"), (B, 1000, "long")):
            claimed = await queue.claim(POOL_ID, at(who), fits=fits)
            assert claimed is not None
            assert claimed.job.id == expected

    async def test_small_jobs_overtake_a_long_one_for_a_while_only(self, harness: Harness) -> None:
        queue = harness.prefill_queue(dataclasses.replace(LIMITS, patience_ms=100))
        await put(queue, job("long", 1000), job("s1", 10), job("s2", 10), job("b1", 10, B))
        first = await queue.claim(POOL_ID, at(A), fits=100)
        assert first is not None
        assert first.job.id == "s1"
        await harness.pass_time(120)
        assert await queue.claim(POOL_ID, at(A), fits=100, steal_from=B) is None
        assert names(await claims(queue, C, 2)) == ["long", "s2"]

    async def test_a_waiting_claim_is_woken(self, harness: Harness) -> None:
        queue = harness.prefill_queue(LIMITS)
        assert await queue.claim(POOL_ID, at(A), fits=-1, wait_ms=1) is None
        first = asyncio.create_task(queue.claim(POOL_ID, at(A), fits=-1, wait_ms=20_000))
        await asyncio.sleep(0.02)
        await put(queue, job("b1", worker=B), job("a1", worker=A))
        claimed = await first
        assert claimed is not None
        assert claimed.job.id == "a1"
        waiting = [asyncio.create_task(queue.claim(POOL_ID, at(it), fits=-1, wait_ms=20_000)) for it in (A, C)]
        await asyncio.sleep(0.02)
        await put(queue, job("s1"))
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        await put(queue, job("s2"))
        assert sorted(names([each for each in await asyncio.gather(*waiting) if each is not None])) == ["s1", "s2"]

    async def test_putting_a_job_again_changes_nothing(self, harness: Harness) -> None:
        queue = harness.prefill_queue(LIMITS)
        await put(queue, waited_for("one"))
        assert not await queue.put(POOL_ID, waited_for("one"), TTL_MS)
        claimed = await claim(queue, A)
        assert not await queue.put(POOL_ID, waited_for("one"), TTL_MS)
        await queue.ack(POOL_ID, claimed, b"")
        assert not await queue.put(POOL_ID, waited_for("one"), TTL_MS)
        assert await queue.results(POOL_ID, ROUTER) == [("one", JobResult(b"", worker=A))]
        assert not await queue.put(POOL_ID, waited_for("one"), TTL_MS)
        assert await nothing(queue, A)

    async def test_saying_again_that_a_job_is_done_is_answered_alike(self, harness: Harness) -> None:
        queue = harness.prefill_queue(LIMITS)
        await put(queue, waited_for("one"))
        first = await claim(queue, A)
        assert await queue.fail(POOL_ID, first, "no luck")
        second = await claim(queue, B)
        for _ in range(2):
            assert await queue.ack(POOL_ID, second, b"x")
            assert not await queue.ack(POOL_ID, first, b"y")
        assert await queue.results(POOL_ID, ROUTER) == [("one", JobResult(b"x", worker=B))]
        assert await queue.results(POOL_ID, ROUTER) == []

    async def test_a_stream_is_bounded_with_what_is_claimed(self, harness: Harness) -> None:
        queue = harness.prefill_queue(LIMITS)
        await put(queue, *(job(f"s{n}") for n in range(5)))
        claimed = await claim(queue, A)
        with pytest.raises(QueueFull, match="has 5 jobs"):
            await queue.put(POOL_ID, job("more"), TTL_MS)
        await put(queue, job("own", worker=A))
        await queue.ack(POOL_ID, claimed, b"")
        await put(queue, job("more"))

    async def test_a_job_that_nobody_claimed_in_time_is_dropped_and_leaves_room(self, harness: Harness) -> None:
        queue = harness.prefill_queue(LIMITS)
        for n in range(4):
            await queue.put(POOL_ID, job(f"short{n}"), 40)
        await put(queue, job("long"))
        await harness.pass_time(60)
        assert await queue.depth(POOL_ID, []) == {None: QueueDepth(1, 100)}
        await put(queue, job("new"))
        assert names(await claims(queue, A, 2)) == ["long", "new"]
        assert await nothing(queue, A)

    async def test_a_failed_attempt_is_tried_by_another_worker(self, harness: Harness) -> None:
        queue = harness.prefill_queue(LIMITS)
        await put(queue, waited_for("a1", worker=A), job("s1"))
        first = await claim(queue, A)
        assert await queue.fail(POOL_ID, first, "out of memory")
        assert (await claim(queue, B)).job == job("s1")
        second = await claim(queue, B)
        assert (second.job, second.attempt) == (waited_for("a1"), 2)
        for late in (queue.extend(POOL_ID, first), queue.ack(POOL_ID, first, b"late"), queue.fail(POOL_ID, first, "")):
            assert not await late
        assert not await queue.release(POOL_ID, first)
        assert await queue.ack(POOL_ID, second, b"done")
        assert await queue.results(POOL_ID, ROUTER) == [("a1", JobResult(b"done", worker=B))]
        assert await queue.dead(POOL_ID) == []

    async def test_after_the_last_attempt_it_is_a_dead_letter(self, harness: Harness) -> None:
        queue = harness.prefill_queue(LIMITS)
        await put(queue, waited_for("bad", 7), waited_for("worse", 8), job("good"))
        for _ in range(5):
            claimed = await claim(queue, A)
            if claimed.job.id == "good":
                assert await queue.ack(POOL_ID, claimed, b"")
            else:
                assert await queue.fail(POOL_ID, claimed, f"no luck with {claimed.job.id}")
        assert await nothing(queue, A)
        assert await queue.results(POOL_ID, ROUTER) == [
            (name, JobResult(b"", f"no luck with {name}", A)) for name in ("bad", "worse")
        ]
        dead = [DeadJob(JobId("worse"), 8, 2, "no luck with worse"), DeadJob(JobId("bad"), 7, 2, "no luck with bad")]
        assert await queue.dead(POOL_ID) == dead
        assert await queue.dead(POOL_ID, limit=1) == dead[:1]
        assert await queue.dead(OTHER_POOL.id) == []
        assert not await queue.put(POOL_ID, waited_for("bad"), TTL_MS)

    async def test_depth_counts_requests_and_tokens_by_stream(self, harness: Harness) -> None:
        queue = harness.prefill_queue(LIMITS)
        assert await queue.depth(POOL_ID, [A]) == {None: QueueDepth(), A: QueueDepth()}
        await put(queue, job("s1", 10), job("s2", 20), job("s3", 40), job("a1", 100, A), job("b1", 1000, B))
        await claim(queue, C)
        await claim(queue, A)
        assert await queue.depth(POOL_ID, [A, C]) == {
            None: QueueDepth(2, 60, 1, 10),
            A: QueueDepth(0, 0, 1, 100),
            C: QueueDepth(),
        }
        assert await queue.depth(OTHER_POOL.id, []) == {None: QueueDepth()}

    async def test_streams_are_those_of_workers_with_jobs_or_claims(self, harness: Harness) -> None:
        queue = harness.prefill_queue(LIMITS)
        assert await queue.streams(POOL_ID) == []
        await put(queue, job("s1"), job("a1", worker=A))
        assert await queue.streams(POOL_ID) == [A]
        shared, own = await claim(queue, C), await claim(queue, A)
        assert await queue.streams(POOL_ID) == [A, C]
        assert await queue.ack(POOL_ID, own, b"")
        assert await queue.streams(POOL_ID) == [C]
        assert await queue.ack(POOL_ID, shared, b"")
        assert await queue.streams(POOL_ID) == []

    async def test_people_see_the_jobs(self, harness: Harness) -> None:
        queue = harness.prefill_queue(LIMITS)
        assert await queue.jobs(POOL_ID) == []
        assert await queue.peek(POOL_ID, JobId("s1")) is None
        await put(queue, job("a1", 7, A, order=-3), waited_for("s1"), job("s2"))
        await claim(queue, A, epoch=5)
        await harness.pass_time(20)
        found = await queue.jobs(POOL_ID)
        assert [(each.id, each.worker, each.claimant, each.attempt) for each in found] == [
            ("s1", None, "", 0),
            ("s2", None, "", 0),
            ("a1", A, "a:1@5", 1),
        ]
        assert (found[2].tokens, found[2].order, found[0].router) == (7, -3, ROUTER)
        assert all(each.age_ms >= 20 and 0 < each.left_ms <= 240_000 for each in found)
        assert [each.id for each in await queue.jobs(POOL_ID, limit=1)] == ["s1"]
        peeked = await queue.peek(POOL_ID, JobId("a1"))
        assert peeked is not None
        assert (peeked[0].claimant, peeked[1]) == ("a:1@5", job("a1").payload)

    async def test_results_end(self, harness: Harness) -> None:
        queue = harness.prefill_queue(dataclasses.replace(LIMITS, result_ttl_ms=40))
        await put(queue, waited_for("one"))
        assert await queue.ack(POOL_ID, await claim(queue, A), b"x")
        await harness.pass_time(60)
        assert await queue.results(POOL_ID, ROUTER) == []
        assert await queue.put(POOL_ID, waited_for("one"), TTL_MS)

    async def test_namespaces_and_pools_do_not_see_each_other(self, harness: Harness) -> None:
        queue = harness.prefill_queue(LIMITS)
        await put(queue, job("one"))
        assert await nothing(harness.prefill_queue(LIMITS, "elsewhere"), A)
        assert await queue.claim(OTHER_POOL.id, at(A), fits=-1) is None

    async def test_every_job_ends_once_whatever_its_workers_do(self, harness: Harness) -> None:
        limits = QueueLimits(length=1000, attempts=3, visibility_ms=60_000, patience_ms=0)
        queue, chance = harness.prefill_queue(limits), random.Random(11)
        workers = [A, B, C]
        ids = [JobId(f"job{n}") for n in range(60)]
        for name in ids:
            await put(queue, waited_for(name, worker=chance.choice([None, *workers])))
        cancelled = {name for name in ids[::10] if await queue.cancel(POOL_ID, name)}
        acked: dict[JobId, int] = {}

        async def work(me: WorkerId, chance: random.Random) -> None:
            while True:
                claimed = None
                for other in workers:
                    if other != me and claimed is None:
                        claimed = await queue.claim(POOL_ID, at(me), fits=-1, steal_from=other)
                if claimed is None:
                    return
                luck = chance.random()
                if luck < 0.3:
                    assert await queue.fail(POOL_ID, claimed, "bad luck")
                elif luck < 0.4:
                    assert await queue.release(POOL_ID, claimed)
                else:
                    assert await queue.extend(POOL_ID, claimed)
                    assert await queue.ack(POOL_ID, claimed, claimed.job.id.encode())
                    acked[claimed.job.id] = acked.get(claimed.job.id, 0) + 1

        await asyncio.gather(*(work(worker, random.Random(n)) for n, worker in enumerate(workers)))
        results = dict(await queue.results(POOL_ID, ROUTER))
        dead = {each.id for each in await queue.dead(POOL_ID)}
        assert set(acked.values()) == {1}
        assert results.keys() == set(ids) - cancelled
        assert {name for name, result in results.items() if not result.error} == acked.keys()
        assert {name for name, result in results.items() if result.error} == dead
        assert set((await queue.depth(POOL_ID, workers)).values()) == {QueueDepth()}
        assert await queue.streams(POOL_ID) == []

    async def test_close_can_be_repeated(self, harness: Harness) -> None:
        queue = harness.prefill_queue(LIMITS)
        await queue.depth(POOL_ID, [])
        await queue.close()
        await queue.close()

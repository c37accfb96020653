"""What every `PrefillQueue` must do. A test module subclasses it; `harness` is a fixture."""

from __future__ import annotations

import asyncio
import dataclasses
import random

import pytest

from tests.conformance.harness import Harness
from tests.conformance.registry import OTHER_POOL, POOL
from vllm_pd.errors import QueueFull
from vllm_pd.state import Claim, DeadJob, JobId, JobResult, PrefillJob, PrefillQueue, QueueDepth, QueueLimits, WorkerId

POOL_ID = POOL.id
TTL_MS = 60_000
LIMITS = QueueLimits(length=5, attempts=2, visibility_ms=60_000)
A, B, C = WorkerId("a:1"), WorkerId("[::1]:2"), WorkerId("c:3")


def job(name: str, tokens: int = 100, worker: WorkerId | None = None) -> PrefillJob:
    return PrefillJob(JobId(name), tokens, b"\x00payload of " + name.encode(), worker)


async def put(queue: PrefillQueue, *jobs: PrefillJob) -> None:
    for each in jobs:
        assert await queue.put(POOL_ID, each, TTL_MS)


async def claimed(queue: PrefillQueue, worker: WorkerId, steal_from: WorkerId | None = None) -> Claim:
    claim = await queue.claim(POOL_ID, worker, steal_from=steal_from)
    assert claim is not None
    return claim


class PrefillQueueConformance:
    """Inherit where there is a fixture `harness`."""

    async def test_a_job_goes_to_one_worker_and_its_result_to_who_waits(self, harness: Harness) -> None:
        router, worker = harness.prefill_queue(LIMITS), harness.prefill_queue(LIMITS)
        assert await worker.claim(POOL_ID, A) is None
        await put(router, job("one"))
        claim = await claimed(worker, A)
        assert (claim.job, claim.claimant, claim.attempt) == (job("one"), A, 1)
        assert await worker.claim(POOL_ID, B) is None
        assert await router.wait_done(POOL_ID, JobId("one"), 0) is None
        waiting = asyncio.create_task(router.wait_done(POOL_ID, JobId("one"), 20_000))
        await asyncio.sleep(0.02)
        assert await worker.ack(POOL_ID, claim, b"\x00blocks")
        assert await waiting == JobResult(b"\x00blocks")
        assert await router.wait_done(POOL_ID, JobId("one"), 0) == JobResult(b"\x00blocks")
        assert await worker.claim(POOL_ID, A) is None

    async def test_own_jobs_come_first_then_shared_ones_then_another_workers(self, harness: Harness) -> None:
        queue = harness.prefill_queue(LIMITS)
        await put(queue, job("s1"), job("b1", worker=B), job("a1", worker=A), job("s2"), job("a2", worker=A))
        names = [(await claimed(queue, A, steal_from=B)).job.id for _ in range(5)]
        assert names == ["a1", "a2", "s1", "s2", "b1"]
        assert await queue.claim(POOL_ID, A, steal_from=B) is None
        await put(queue, job("b2", worker=B))
        assert await queue.claim(POOL_ID, A) is None
        assert (await claimed(queue, C, steal_from=B)).job == job("b2", worker=B)

    async def test_a_waiting_claim_is_woken(self, harness: Harness) -> None:
        queue = harness.prefill_queue(LIMITS)
        assert await queue.claim(POOL_ID, A, wait_ms=1) is None
        first = asyncio.create_task(queue.claim(POOL_ID, A, wait_ms=20_000))
        await asyncio.sleep(0.02)
        await put(queue, job("b1", worker=B), job("a1", worker=A))
        claim = await first
        assert claim is not None
        assert claim.job.id == "a1"
        waiting = [asyncio.create_task(queue.claim(POOL_ID, name, wait_ms=20_000)) for name in (A, C)]
        await asyncio.sleep(0.02)
        await put(queue, job("s1"))
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        await put(queue, job("s2"))
        got = [each.job.id for each in await asyncio.gather(*waiting) if each is not None]
        assert sorted(got) == ["s1", "s2"]

    async def test_putting_a_job_again_changes_nothing(self, harness: Harness) -> None:
        queue = harness.prefill_queue(LIMITS)
        await put(queue, job("one"))
        assert not await queue.put(POOL_ID, job("one"), TTL_MS)
        claim = await claimed(queue, A)
        assert not await queue.put(POOL_ID, job("one"), TTL_MS)
        await queue.ack(POOL_ID, claim, b"")
        assert not await queue.put(POOL_ID, job("one"), TTL_MS)
        assert await queue.claim(POOL_ID, A) is None

    async def test_a_stream_is_bounded_with_what_is_claimed(self, harness: Harness) -> None:
        queue = harness.prefill_queue(LIMITS)
        await put(queue, *(job(f"s{n}") for n in range(5)))
        claim = await claimed(queue, A)
        with pytest.raises(QueueFull, match="has 5 jobs"):
            await queue.put(POOL_ID, job("more"), TTL_MS)
        await put(queue, job("own", worker=A))
        await queue.ack(POOL_ID, claim, b"")
        await put(queue, job("more"))

    async def test_a_job_that_nobody_claimed_in_time_is_dropped_and_leaves_room(self, harness: Harness) -> None:
        queue = harness.prefill_queue(LIMITS)
        for n in range(4):
            await queue.put(POOL_ID, job(f"short{n}"), 40)
        await put(queue, job("long"))
        await harness.pass_time(60)
        assert await queue.depth(POOL_ID, []) == {None: QueueDepth(1, 100)}
        await put(queue, job("new"))
        assert [(await claimed(queue, A)).job.id for _ in range(2)] == ["long", "new"]
        assert await queue.claim(POOL_ID, A) is None

    async def test_a_failed_attempt_is_tried_by_another_worker(self, harness: Harness) -> None:
        queue = harness.prefill_queue(LIMITS)
        await put(queue, job("a1", worker=A), job("s1"))
        first = await claimed(queue, A)
        assert await queue.fail(POOL_ID, first, "out of memory")
        assert [(await claimed(queue, B)).job for _ in range(1)] == [job("s1")]
        second = await claimed(queue, B)
        assert (second.job, second.attempt) == (job("a1"), 2)
        for late in (queue.extend(POOL_ID, first), queue.ack(POOL_ID, first, b"late"), queue.fail(POOL_ID, first, "")):
            assert not await late
        assert await queue.ack(POOL_ID, second, b"done")
        assert await queue.wait_done(POOL_ID, JobId("a1"), 0) == JobResult(b"done")
        assert await queue.dead(POOL_ID) == []

    async def test_after_the_last_attempt_it_is_a_dead_letter(self, harness: Harness) -> None:
        queue = harness.prefill_queue(LIMITS)
        await put(queue, job("bad", 7), job("worse", 8))
        for _ in range(4):
            claim = await claimed(queue, A)
            assert await queue.fail(POOL_ID, claim, f"no luck with {claim.job.id}")
        assert await queue.claim(POOL_ID, A) is None
        assert await queue.wait_done(POOL_ID, JobId("bad"), 0) == JobResult(b"", "no luck with bad")
        dead = [DeadJob(JobId("worse"), 8, 2, "no luck with worse"), DeadJob(JobId("bad"), 7, 2, "no luck with bad")]
        assert await queue.dead(POOL_ID) == dead
        assert await queue.dead(POOL_ID, limit=1) == dead[:1]
        assert await queue.dead(OTHER_POOL.id) == []

    async def test_a_silent_worker_loses_its_job_and_a_talking_one_keeps_it(self, harness: Harness) -> None:
        queue = harness.prefill_queue(dataclasses.replace(LIMITS, visibility_ms=300))
        await put(queue, job("s1"), job("s2"), job("b1", worker=B))
        silent, talking, own = await claimed(queue, A), await claimed(queue, C), await claimed(queue, B)
        assert await queue.reclaim(POOL_ID, None) == 0
        await harness.pass_time(200)
        assert await queue.extend(POOL_ID, talking)
        await harness.pass_time(150)
        assert await queue.extend(POOL_ID, talking)
        assert await queue.reclaim(POOL_ID, None) == 1
        assert await queue.reclaim(POOL_ID, B) == 1
        assert await queue.reclaim(POOL_ID, WorkerId("never:1")) == 0
        again = [await claimed(queue, C) for _ in range(2)]
        assert [(claim.job, claim.attempt) for claim in again] == [(job("s1"), 2), (job("b1"), 2)]
        assert not await queue.extend(POOL_ID, silent)
        assert not await queue.ack(POOL_ID, own, b"")
        assert await queue.ack(POOL_ID, talking, b"")
        await harness.pass_time(350)
        assert await queue.reclaim(POOL_ID, None) == 2
        assert {dead.id for dead in await queue.dead(POOL_ID)} == {"s1", "b1"}
        result = await queue.wait_done(POOL_ID, JobId("s1"), 0)
        assert result is not None
        assert "c:3 said nothing" in result.error

    async def test_cancelled_jobs_are_forgotten_and_their_worker_hears_so(self, harness: Harness) -> None:
        queue = harness.prefill_queue(LIMITS)
        await put(queue, job("waiting"), job("claimed", worker=A), job("other"))
        claim = await claimed(queue, A)
        assert await queue.cancel(POOL_ID, JobId("waiting"))
        assert await queue.cancel(POOL_ID, JobId("claimed"))
        assert not await queue.cancel(POOL_ID, JobId("claimed"))
        assert not await queue.extend(POOL_ID, claim)
        assert not await queue.ack(POOL_ID, claim, b"")
        assert await queue.depth(POOL_ID, [A]) == {None: QueueDepth(1, 100), A: QueueDepth()}
        assert (await claimed(queue, B)).job.id == "other"
        assert await queue.claim(POOL_ID, B) is None
        assert await queue.wait_done(POOL_ID, JobId("claimed"), 0) is None

    async def test_jobs_of_a_worker_that_is_gone_go_to_the_others(self, harness: Harness) -> None:
        queue = harness.prefill_queue(LIMITS)
        await put(queue, *(job(f"a{n}", worker=A) for n in range(4)))
        await claimed(queue, A)
        stolen = await claimed(queue, B, steal_from=A)
        assert await queue.rehome(POOL_ID, A) == 3
        assert await queue.rehome(POOL_ID, A) == 0
        assert [(claim.job.id, claim.attempt) for claim in [await claimed(queue, B) for _ in range(3)]] == [
            ("a0", 2),
            ("a2", 1),
            ("a3", 1),
        ]
        assert await queue.ack(POOL_ID, stolen, b"")

    async def test_depth_counts_requests_and_tokens_by_stream(self, harness: Harness) -> None:
        queue = harness.prefill_queue(LIMITS)
        assert await queue.depth(POOL_ID, [A]) == {None: QueueDepth(), A: QueueDepth()}
        await put(queue, job("s1", 10), job("s2", 20), job("s3", 40), job("a1", 100, A), job("b1", 1000, B))
        await claimed(queue, C)
        await claimed(queue, A)
        assert await queue.depth(POOL_ID, [A, C]) == {
            None: QueueDepth(2, 60, 1, 10),
            A: QueueDepth(0, 0, 1, 100),
            C: QueueDepth(),
        }
        assert await queue.depth(OTHER_POOL.id, []) == {None: QueueDepth()}

    async def test_results_end(self, harness: Harness) -> None:
        queue = harness.prefill_queue(dataclasses.replace(LIMITS, result_ttl_ms=40))
        await put(queue, job("one"))
        assert await queue.ack(POOL_ID, await claimed(queue, A), b"x")
        assert await queue.wait_done(POOL_ID, JobId("one"), 0) == JobResult(b"x")
        await harness.pass_time(60)
        assert await queue.wait_done(POOL_ID, JobId("one"), 0) is None

    async def test_an_emptied_store_is_an_empty_queue(self, harness: Harness) -> None:
        queue = harness.prefill_queue(LIMITS)
        await put(queue, job("one"), job("two"))
        claim = await claimed(queue, A)
        await harness.lose_everything()
        assert not await queue.ack(POOL_ID, claim, b"")
        assert await queue.claim(POOL_ID, A) is None
        await put(queue, job("one"))
        assert (await claimed(queue, A)).job.id == "one"

    async def test_namespaces_and_pools_do_not_see_each_other(self, harness: Harness) -> None:
        queue = harness.prefill_queue(LIMITS)
        await put(queue, job("one"))
        assert await harness.prefill_queue(LIMITS, "elsewhere").claim(POOL_ID, A) is None
        assert await queue.claim(OTHER_POOL.id, A) is None

    async def test_every_job_ends_once_whatever_its_workers_do(self, harness: Harness) -> None:
        limits = QueueLimits(length=1000, attempts=3, visibility_ms=60_000)
        queue, chance = harness.prefill_queue(limits), random.Random(11)
        workers = [A, B, C]
        names = [JobId(f"job{n}") for n in range(60)]
        for name in names:
            await put(queue, job(name, worker=chance.choice([None, *workers])))
        cancelled = {name for name in names[::10] if await queue.cancel(POOL_ID, name)}
        results: dict[JobId, int] = {}

        async def work(me: WorkerId, chance: random.Random) -> None:
            while True:
                others = [each for each in workers if each != me]
                claim = None
                for other in others:
                    claim = claim or await queue.claim(POOL_ID, me, steal_from=other)
                if claim is None:
                    return
                if chance.random() < 0.3:
                    assert await queue.fail(POOL_ID, claim, "bad luck")
                else:
                    assert await queue.extend(POOL_ID, claim)
                    assert await queue.ack(POOL_ID, claim, claim.job.id.encode())
                    results[claim.job.id] = results.get(claim.job.id, 0) + 1

        await asyncio.gather(*(work(worker, random.Random(n)) for n, worker in enumerate(workers)))
        dead = {each.id for each in await queue.dead(POOL_ID)}
        assert set(results.values()) == {1}
        assert results.keys() | dead == set(names) - cancelled
        assert not results.keys() & dead
        assert set((await queue.depth(POOL_ID, workers)).values()) == {QueueDepth()}

    async def test_close_can_be_repeated(self, harness: Harness) -> None:
        queue = harness.prefill_queue(LIMITS)
        await queue.depth(POOL_ID, [])
        await queue.close()
        await queue.close()

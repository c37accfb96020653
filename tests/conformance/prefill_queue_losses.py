"""What every `PrefillQueue` must do when workers, routers and clients go. Used as `prefill_queue` is."""

from __future__ import annotations

import asyncio
import dataclasses

from tests.conformance.harness import Harness
from tests.conformance.prefill_queue import (
    LIMITS,
    POOL_ID,
    ROUTER,
    TTL_MS,
    A,
    B,
    C,
    at,
    claim,
    claims,
    job,
    names,
    nothing,
    put,
    waited_for,
)
from tests.conformance.registry import worker
from vllm_pd.state import Epoch, JobId, JobResult, QueueDepth, WorkerId


class PrefillQueueLosses:
    """Inherit where there is a fixture `harness`."""

    async def test_others_have_a_while_to_take_what_failed_on_a_worker(self, harness: Harness) -> None:
        queue = harness.prefill_queue(dataclasses.replace(LIMITS, attempts=9, patience_ms=200))
        await put(queue, job("one"))
        assert await queue.fail(POOL_ID, await claim(queue, A), "no luck")
        assert await nothing(queue, A)
        assert await queue.fail(POOL_ID, await claim(queue, B), "no luck either")
        assert await nothing(queue, B)
        await harness.pass_time(250)
        assert (await claim(queue, B)).attempt == 3

    async def test_a_silent_worker_loses_its_job_and_a_talking_one_keeps_it(self, harness: Harness) -> None:
        queue = harness.prefill_queue(dataclasses.replace(LIMITS, visibility_ms=300))
        await put(queue, waited_for("s1"), job("s2"), job("b1", worker=B))
        silent, talking, own = await claim(queue, A), await claim(queue, C), await claim(queue, B)
        assert await queue.reclaim(POOL_ID, None) == 0
        await harness.pass_time(200)
        assert await queue.extend(POOL_ID, talking)
        await harness.pass_time(150)
        assert await queue.extend(POOL_ID, talking)
        assert await queue.reclaim(POOL_ID, None) == 1
        assert await queue.reclaim(POOL_ID, B) == 1
        assert await queue.reclaim(POOL_ID, WorkerId("never:1")) == 0
        again = await claims(queue, C, 2)
        assert [(each.job, each.attempt) for each in again] == [(waited_for("s1"), 2), (job("b1"), 2)]
        assert not await queue.extend(POOL_ID, silent)
        assert not await queue.ack(POOL_ID, own, b"")
        assert await queue.ack(POOL_ID, talking, b"")
        await harness.pass_time(350)
        assert await queue.reclaim(POOL_ID, None) == 2
        assert {dead.id for dead in await queue.dead(POOL_ID)} == {"s1", "b1"}
        ((name, result),) = await queue.results(POOL_ID, ROUTER)
        assert name == "s1"
        assert "c:3 said nothing for" in result.error

    async def test_a_job_can_be_given_back_without_counting(self, harness: Harness) -> None:
        queue = harness.prefill_queue(LIMITS)
        await put(queue, job("a1", worker=A, order=-5))
        for _ in range(5):
            claimed = await claim(queue, A)
            assert claimed.attempt == 1
            assert await queue.release(POOL_ID, claimed)
            assert not await queue.release(POOL_ID, claimed)
        assert await queue.depth(POOL_ID, [A]) == {None: QueueDepth(1, 100), A: QueueDepth()}
        again = await claim(queue, B)
        assert (again.job, again.attempt) == (job("a1", order=-5), 1)
        assert await queue.takeover(POOL_ID, A, Epoch(2)) == 0

    async def test_cancelled_jobs_are_forgotten_and_their_worker_hears_so(self, harness: Harness) -> None:
        queue = harness.prefill_queue(LIMITS)
        await put(queue, waited_for("waiting"), waited_for("claimed", worker=A), job("other"))
        claimed = await claim(queue, A)
        assert await queue.cancelled(POOL_ID, at(A)) == []
        hears = asyncio.create_task(queue.cancelled(POOL_ID, at(A), 20_000))
        await asyncio.sleep(0.02)
        assert await queue.cancel(POOL_ID, JobId("waiting"))
        assert await queue.cancel(POOL_ID, JobId("claimed"))
        assert not await queue.cancel(POOL_ID, JobId("claimed"))
        assert await hears == ["claimed"]
        assert await queue.cancelled(POOL_ID, at(A)) == []
        assert not await queue.extend(POOL_ID, claimed)
        assert not await queue.ack(POOL_ID, claimed, b"")
        assert await queue.depth(POOL_ID, [A]) == {None: QueueDepth(1, 100), A: QueueDepth()}
        assert (await claim(queue, B)).job.id == "other"
        assert await nothing(queue, B)
        assert await queue.results(POOL_ID, ROUTER) == []

    async def test_whoever_waits_hears_why_somebody_else_cancelled(self, harness: Harness) -> None:
        queue = harness.prefill_queue(LIMITS)
        await put(queue, waited_for("claimed"), waited_for("waiting"))
        claimed = await claim(queue, A)
        for name in ("claimed", "waiting"):
            assert await queue.cancel(POOL_ID, JobId(name), "by hand")
            assert not await queue.cancel(POOL_ID, JobId(name), "by hand")
        expected = [("claimed", JobResult(b"", "by hand", A)), ("waiting", JobResult(b"", "by hand"))]
        assert await queue.results(POOL_ID, ROUTER) == expected
        assert await queue.cancelled(POOL_ID, at(A)) == ["claimed"]
        assert not await queue.ack(POOL_ID, claimed, b"")
        assert await queue.streams(POOL_ID) == []

    async def test_a_cancel_that_overtakes_its_job_counts(self, harness: Harness) -> None:
        queue = harness.prefill_queue(LIMITS)
        assert not await queue.cancel(POOL_ID, JobId("one"))
        assert not await queue.put(POOL_ID, job("one"), TTL_MS)
        assert await nothing(queue, A)

    async def test_a_cancel_after_the_end_changes_nothing(self, harness: Harness) -> None:
        queue = harness.prefill_queue(LIMITS)
        await put(queue, waited_for("one"))
        claimed = await claim(queue, A)
        assert await queue.ack(POOL_ID, claimed, b"x")
        assert not await queue.cancel(POOL_ID, JobId("one"))
        assert await queue.ack(POOL_ID, claimed, b"x")
        assert await queue.results(POOL_ID, ROUTER) == [("one", JobResult(b"x", worker=A))]

    async def test_a_restarted_worker_gives_up_what_it_had(self, harness: Harness) -> None:
        queue = harness.prefill_queue(LIMITS)
        await put(queue, job("a1", worker=A), job("s1"), job("b1", worker=B), job("a2", worker=A), job("s2"))
        own, shared, stolen = (await claim(queue, A), await claim(queue, C), await claim(queue, C, steal_from=B))
        assert names([own, shared, stolen]) == ["a1", "s1", "s2"]
        stolen = await claim(queue, C, steal_from=B)
        assert stolen.job == job("b1", worker=B)
        assert await queue.takeover(POOL_ID, C, Epoch(1)) == 0
        assert await queue.takeover(POOL_ID, C, Epoch(2)) == 3
        assert await queue.takeover(POOL_ID, C, Epoch(2)) == 0
        for late in (shared, stolen):
            assert not await queue.ack(POOL_ID, late, b"")
        assert await queue.ack(POOL_ID, own, b"")
        again = [await claim(queue, C, epoch=2) for _ in range(3)]
        assert {(each.job.id, each.attempt) for each in again} == {("s1", 2), ("s2", 2), ("b1", 2)}
        assert names([await claim(queue, A)]) == ["a2"]
        assert await queue.takeover(POOL_ID, C, Epoch(3)) == 3
        assert {each.error for each in await queue.dead(POOL_ID)} == {"c:3 was restarted"}

    async def test_an_older_start_of_a_worker_gets_no_jobs(self, harness: Harness) -> None:
        queue, registry = harness.prefill_queue(LIMITS), harness.registry()
        await put(queue, job("one"))
        await registry.heartbeat(worker(A, 7), 60_000)
        assert await nothing(queue, A, epoch=6)
        assert (await claim(queue, A, epoch=7)).job.id == "one"

    async def test_jobs_of_a_worker_that_is_gone_go_to_the_others(self, harness: Harness) -> None:
        queue = harness.prefill_queue(LIMITS)
        await put(queue, *(job(f"a{n}", worker=A) for n in range(4)), job("s1"))
        await claim(queue, A)
        stolen = await claim(queue, B, steal_from=A)
        assert stolen.job.id == "s1"
        stolen = await claim(queue, B, steal_from=A)
        assert await queue.rehome(POOL_ID, A) == 3
        assert await queue.rehome(POOL_ID, A) == 0
        again = await claims(queue, B, 3)
        assert [(each.job.id, each.attempt) for each in again] == [("a0", 2), ("a2", 1), ("a3", 1)]
        assert await queue.ack(POOL_ID, stolen, b"")
        assert await queue.rehome(POOL_ID, B) == 4
        assert await queue.streams(POOL_ID) == []

    async def test_worker_that_takes_no_more_jobs_finishes_those_that_it_has(self, harness: Harness) -> None:
        queue = harness.prefill_queue(LIMITS)
        await put(queue, *(job(f"a{n}", worker=A) for n in range(3)))
        running = await claim(queue, A)
        assert await queue.rehome(POOL_ID, A, claims=False) == 2
        assert names(await claims(queue, B, 2)) == ["a1", "a2"]
        assert await queue.rehome(POOL_ID, A, claims=False) == 0
        assert await queue.ack(POOL_ID, running, b"")

    async def test_what_waits_behind_many_claimed_jobs_of_a_leaving_worker_is_moved(self, harness: Harness) -> None:
        queue = harness.prefill_queue(dataclasses.replace(LIMITS, length=100))
        await put(queue, *(job(f"a{n}", worker=A) for n in range(70)))
        await claims(queue, A, 65)
        assert await queue.rehome(POOL_ID, A, claims=False) == 5
        assert names(await claims(queue, B, 5)) == [f"a{n}" for n in range(65, 70)]

    async def test_leftovers_of_a_silent_router_are_dropped(self, harness: Harness) -> None:
        limits = dataclasses.replace(LIMITS, silence_ms=200)
        queue = harness.prefill_queue(limits)
        await queue.announce_router(POOL_ID, ROUTER, 60_000)
        await put(queue, waited_for("waited for"), job("forsaken", router="gone"), job("nobodys"))
        await put(queue, job("mine", router="gone", worker=A))
        claimed = await claim(queue, A)
        assert claimed.job.id == "mine"
        assert await queue.extend(POOL_ID, claimed)
        await harness.pass_time(250)
        assert not await queue.extend(POOL_ID, claimed)
        assert names(await claims(queue, B, 2)) == ["waited for", "nobodys"]
        assert await nothing(queue, B)
        ended = await queue.results(POOL_ID, "gone")
        assert {(name, result.error) for name, result in ended} == {
            (name, "its router said nothing for 200 ms") for name in ("mine", "forsaken")
        }

    async def test_leftovers_of_a_silent_router_leave_room(self, harness: Harness) -> None:
        queue = harness.prefill_queue(dataclasses.replace(LIMITS, silence_ms=500))
        await put(queue, *(job(f"s{n}", router="gone") for n in range(5)))
        claimed = await claim(queue, A)
        await harness.pass_time(550)
        await put(queue, job("new"))
        assert await queue.depth(POOL_ID, []) == {None: QueueDepth(1, 100, 1, 100)}
        assert not await queue.extend(POOL_ID, claimed)

    async def test_an_emptied_store_is_an_empty_queue(self, harness: Harness) -> None:
        queue = harness.prefill_queue(LIMITS)
        await put(queue, waited_for("one"), job("two"))
        claimed = await claim(queue, A)
        await harness.lose_everything()
        assert not await queue.ack(POOL_ID, claimed, b"")
        assert await nothing(queue, A)
        await put(queue, waited_for("one"))
        again = await claim(queue, A)
        assert again.job.id == "one"
        assert await queue.ack(POOL_ID, again, b"x")
        assert await queue.results(POOL_ID, ROUTER) == [("one", JobResult(b"x", worker=A))]

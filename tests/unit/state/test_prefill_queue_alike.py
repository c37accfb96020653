"""The queue in memory and the one in a store answer alike, whatever is done to both.

But for the order in which jobs that are given up together arrive, of which nothing is promised.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tests.conformance.prefill_queue import POOL_ID, TTL_MS, A, B, C
from vllm_pd.errors import QueueFull
from vllm_pd.graph.embedded_store import EmbeddedStore
from vllm_pd.state import (
    Claim,
    Claimant,
    Epoch,
    JobId,
    MemoryPrefillQueue,
    PrefillJob,
    PrefillQueue,
    QueueLimits,
    WorkerId,
)
from vllm_pd.state.redis_prefill_queue import RedisPrefillQueue

STEPS = 400
SEEN = 60
"""Jobs: a claim sees all of them."""
WORKERS = (A, B, C)
ROUTERS = ("", "r1", "r2")
NOT_IN_TIME = 3_600_000


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with EmbeddedStore() as store:
        yield store.url


@pytest.fixture(params=[0, NOT_IN_TIME], ids=["no patience", "much patience"])
async def both(request: pytest.FixtureRequest, url: str) -> AsyncIterator[tuple[PrefillQueue, PrefillQueue]]:
    limits = QueueLimits(
        length=12, attempts=2, visibility_ms=NOT_IN_TIME, patience_ms=request.param, silence_ms=NOT_IN_TIME
    )
    name = f"patience-{request.param}"
    redis, memory = RedisPrefillQueue(url, name, limits=limits, timeout_s=10.0), MemoryPrefillQueue(name, limits=limits)
    yield redis, memory
    await redis.close()


class Player:
    """Does the same to both queues and compares the answers."""

    def __init__(self, both: tuple[PrefillQueue, PrefillQueue], chance: random.Random) -> None:
        self._both = both
        self._chance = chance
        self._jobs = 0
        self._epochs = dict.fromkeys(WORKERS, 1)
        self._claims: list[tuple[Claim, Claim]] = []
        """As each of the two sees them, those that are over included."""

    async def step(self) -> str:
        """Do something; returns what."""
        chance = self._chance
        actions = {"put": 6, "claim": 6, "about_claim": 6, "cancel": 1, "restart": 0.3, "leave": 0.3, "look": 1}
        action = chance.choices(list(actions), list(actions.values()))[0]
        await getattr(self, f"_{action}")()
        return action

    async def _alike(self, method: str, *args: Any, **named: Any) -> Any:
        answers = []
        for queue in self._both:
            try:
                answer = await getattr(queue, method)(POOL_ID, *args, **named)
                answers.append(sorted(answer, key=repr) if isinstance(answer, list) else answer)
            except QueueFull as e:
                answers.append(str(e))
        assert answers[0] == answers[1], (method, args, named)
        return answers[0]

    def _claimant(self) -> Claimant:
        worker = self._chance.choice(WORKERS)
        return Claimant(worker, Epoch(self._epochs[worker]))

    def _known_job(self) -> JobId:
        return JobId(f"job{self._chance.randrange(self._jobs + 1)}")

    async def _put(self) -> None:
        chance = self._chance
        if len(await self._both[1].jobs(POOL_ID)) > SEEN:
            return
        self._jobs += chance.random() < 0.95
        job = PrefillJob(
            JobId(f"job{self._jobs}"),
            chance.randrange(1, 1000),
            chance.randbytes(5),
            chance.choice([None, *WORKERS]),
            # No two have the same.
            chance.randrange(-(1 << 62), 1 << 62) if chance.random() < 0.5 else self._jobs,
            chance.choice(ROUTERS),
        )
        await self._alike("put", job, TTL_MS)

    async def _claim(self) -> None:
        chance, claimant = self._chance, self._claimant()
        fits, steal_from = chance.choice([-1, 0, 100, 900]), chance.choice([None, *WORKERS])
        found = [await queue.claim(POOL_ID, claimant, fits=fits, steal_from=steal_from) for queue in self._both]
        if found[0] is None or found[1] is None:
            assert found == [None, None], (claimant, fits, steal_from)
            return
        seen = [(claim.job, claim.claimant, claim.attempt) for claim in found if claim is not None]
        assert seen[0] == seen[1], (claimant, fits, steal_from)
        self._claims.append((found[0], found[1]))

    async def _about_claim(self) -> None:
        """Also of one that is over."""
        if not self._claims:
            return
        chance = self._chance
        each = chance.choice(self._claims[-30:])
        method = chance.choice(["ack", "ack", "fail", "release", "extend"])
        args = {"ack": (chance.randbytes(3),), "fail": ("no luck",)}.get(method, ())
        answers = [
            await getattr(queue, method)(POOL_ID, claim, *args) for queue, claim in zip(self._both, each, strict=True)
        ]
        assert answers[0] == answers[1], (method, each[0])

    async def _cancel(self) -> None:
        await self._alike("cancel", self._known_job(), self._chance.choice(["", "by hand"]))

    async def _restart(self) -> None:
        worker = self._chance.choice(WORKERS)
        self._epochs[worker] += 1
        await self._alike("takeover", worker, Epoch(self._epochs[worker]))

    async def _leave(self) -> None:
        await self._alike("rehome", self._chance.choice(WORKERS), claims=self._chance.random() < 0.5)

    async def _look(self) -> None:
        await self._alike("depth", WORKERS)
        await self._alike("streams")
        await self._alike("dead")
        for router in ROUTERS:
            await self._alike("results", router)
        for worker in WORKERS:
            for epoch in range(1, self._epochs[worker] + 1):
                await self._alike("cancelled", Claimant(worker, Epoch(epoch)))
        seen = [{_lasting(info) for info in await queue.jobs(POOL_ID)} for queue in self._both]
        assert seen[0] == seen[1]
        job = self._known_job()
        peeked = [await queue.peek(POOL_ID, job) for queue in self._both]
        first, second = (each and (_lasting(each[0]), each[1]) for each in peeked)
        assert first == second


def _lasting(info: Any) -> tuple[JobId, WorkerId | None, int, int, str, int, str]:
    """A job without what the clock says of it."""
    return info.id, info.worker, info.tokens, info.order, info.router, info.attempt, info.claimant


async def test_both_answer_alike(both: tuple[PrefillQueue, PrefillQueue]) -> None:
    player = Player(both, random.Random(7))
    done = [await player.step() for _ in range(STEPS)]
    assert len(set(done)) == 7

"""Lets go of blocks that a prefill worker keeps for a hand-off which nobody will read.

Without it they stay until their lease ends, half a minute by default. Sent in the background: nobody waits for it, and
what does not arrive is what the lease is for.

A hold may be let go only if no decode worker can be reading it: its transfer parameters went to none, or only to
workers that refused the connection. One that was sent them and then fell silent may read on, and would find another
request's KV in blocks that were let go; there the lease is what ends them.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

import msgspec

from vllm_pd.background import end_tasks
from vllm_pd.holds import MAX_KEYS, RELEASE_FIELD
from vllm_pd.router.headers import to_worker
from vllm_pd.router.leg_request import RANK_HEADER
from vllm_pd.router.metrics import RouterMetrics
from vllm_pd.router.transport import Headers, Upstream, UpstreamError
from vllm_pd.state.base import WorkerRecord

DEADLINE_S = 5.0
"""For the worker's answer. The release counts as soon as its engine has the request, before it is scheduled."""
MAX_WAITING = 4096
"""Keys that wait for one engine; those beyond are left to their lease."""
_MAX_ANSWER = 1024 * 1024
_LEFT_TO_LEASE = "left_to_lease"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Hold:
    """Blocks that a prefill worker keeps for one request of this router, or will keep when it has computed them."""

    record: WorkerRecord
    """The worker that computes or has computed them."""
    key: str
    """As `legs.prefill_body` wrote it into the prefill leg; from `holds.new_key`."""
    rank: int | None = None
    """Engine of a data-parallel worker; None: any of them."""
    authorization: str = field(default="", repr=False)
    """The client's `Authorization`, for workers that check it themselves."""


@dataclass(frozen=True, slots=True)
class _Engine:
    url: str
    model: str
    rank: int | None
    authorization: str = field(repr=False)


class Releases:
    """Belongs to one router; used inside its event loop."""

    def __init__(self, upstream: Upstream, metrics: RouterMetrics, *, worker_key: str = "") -> None:
        self._upstream = upstream
        self._metrics = metrics
        self._worker_key = worker_key
        self._waiting: dict[_Engine, list[str]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def release(self, hold: Hold) -> None:
        """Have the blocks let go soon, also if they are still being computed. Returns at once and never raises;
        twice is the same as once."""
        record = hold.record
        if record.dp_size <= 1:
            ranks: tuple[int | None, ...] = (None,)
        else:
            ranks = tuple(range(record.dp_size)) if hold.rank is None else (hold.rank,)
        model = record.models[0] if record.models else record.pool.model
        for rank in ranks:
            self._add(_Engine(record.url, model, rank, hold.authorization), hold.key)

    async def close(self) -> None:
        """Drop what has not been sent. Idempotent."""
        self._waiting.clear()
        await end_tasks(list(self._tasks))

    def _add(self, engine: _Engine, key: str) -> None:
        waiting = self._waiting.get(engine)
        if waiting is not None:
            # A request to this engine is under way; the next one takes all that have come meanwhile.
            if len(waiting) < MAX_WAITING:
                waiting.append(key)
            else:
                self._metrics.releases.labels(_LEFT_TO_LEASE).inc()
            return
        self._waiting[engine] = [key]
        task = asyncio.create_task(self._send_all(engine))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_all(self, engine: _Engine) -> None:
        try:
            while keys := self._waiting.get(engine):
                batch, keys[:] = keys[:MAX_KEYS], keys[MAX_KEYS:]
                problem = await self._send(engine, batch)
                self._metrics.releases.labels(_LEFT_TO_LEASE if problem else "released").inc(len(batch))
                if problem:
                    _log.debug("%s keeps %d hand-offs until their lease ends: %s", engine.url, len(batch), problem)
        finally:
            self._waiting.pop(engine, None)

    async def _send(self, engine: _Engine, keys: list[str]) -> str:
        """Why it failed; empty when the worker took it."""
        body = msgspec.json.encode(
            {"model": engine.model, "prompt": [0], "max_tokens": 1, "kv_transfer_params": {RELEASE_FIELD: keys}}
        )
        client: Headers = [("Authorization", engine.authorization)] if engine.authorization else []
        headers = to_worker(client, worker_key=self._worker_key, request_id=None)
        headers.append(("Content-Type", "application/json"))
        if engine.rank is not None:
            headers.append((RANK_HEADER, str(engine.rank)))
        try:
            answer = await self._upstream.open("POST", engine.url, "/v1/completions", headers, body, DEADLINE_S)
            try:
                await answer.read(_MAX_ANSWER, DEADLINE_S)
            finally:
                answer.close()
        except UpstreamError as e:
            return str(e)
        return "" if answer.status == 200 else f"it answered with status {answer.status}"

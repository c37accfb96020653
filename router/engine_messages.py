"""Sends an engine what it is to know beside its requests: in the `kv_transfer_params` of a request for one token.

In the background: nobody waits for it. One request at a time to each engine takes all that wait for it. It counts as
soon as the engine has it, before it is scheduled; what does not arrive within a deadline is dropped and counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from http import HTTPStatus
from typing import Any, Generic, TypeVar

import msgspec

from vllm_pd.background import end_tasks
from vllm_pd.router.headers import RANK_HEADER, to_worker
from vllm_pd.router.transport import ConnectFailed, Headers, Upstream, UpstreamError
from vllm_pd.state.base import WorkerRecord

DEADLINE_S = 15.0
"""For the worker's answer; half the usual lease. An API server that is busy for longer drops it with the connection."""
LAST_S = 1.0
"""For what is under way when the router stops."""
MAX_WAITING = 4096
"""For one engine; those beyond are dropped."""
_MAX_ANSWER = 1024 * 1024

_log = logging.getLogger(__name__)

Item = TypeVar("Item")


class Sent(StrEnum):
    """What became of a message. Labels of metrics."""

    DELIVERED = "delivered"
    UNREACHABLE = "unreachable"
    """No connection was made."""
    NO_ANSWER = "no_answer"
    REFUSED = "refused"
    """It answered with another status than 200."""
    TOO_MANY = "too_many"
    """Too many others waited for that engine."""
    STOPPED = "stopped"
    """The router was stopped."""


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine behind a worker's URL."""

    url: str
    model: str
    rank: int | None
    """Data-parallel rank; None where there is but one."""
    authorization: str = field(repr=False)
    """The client's, for workers that check it themselves; empty for none."""
    id: str = ""
    """Of its KV transfers, where it matters which one it is."""


def engine_of(record: WorkerRecord, rank: int | None, authorization: str, id: str = "") -> Engine:
    """Engine `rank` of a worker."""
    model = record.models[0] if record.models else record.pool.model
    return Engine(record.url, model, rank, authorization, id)


class EngineMessages(Generic[Item]):
    """Messages of one kind. Belongs to one router; used inside its event loop.

    Args:
        params: the `kv_transfer_params` that tell an engine some items.
        counted: what became of how many.
        most: items of one request.
        worker_key: the workers' API key, if the router has one of its own.
    """

    def __init__(
        self,
        upstream: Upstream,
        params: Callable[[Engine, Sequence[Item]], Mapping[str, Any]],
        counted: Callable[[Sent, int], None],
        *,
        most: int,
        worker_key: str = "",
    ) -> None:
        self._upstream = upstream
        self._params = params
        self._counted = counted
        self._most = most
        self._worker_key = worker_key
        self._waiting: dict[Engine, list[Item]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, engine: Engine, item: Item) -> None:
        """Have the engine told soon. Returns at once and never raises."""
        waiting = self._waiting.get(engine)
        if waiting is not None:
            # A request to this engine is under way; the next one takes all that have come meanwhile.
            if len(waiting) < MAX_WAITING:
                waiting.append(item)
            else:
                self._counted(Sent.TOO_MANY, 1)
            return
        self._waiting[engine] = [item]
        task = asyncio.create_task(self._send_all(engine))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Give what is under way a moment, and drop what has not been sent by then. Idempotent."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=LAST_S)
        await end_tasks(list(self._tasks))

    async def _send_all(self, engine: Engine) -> None:
        batch: list[Item] = []
        try:
            while waiting := self._waiting.get(engine):
                batch, waiting[:] = waiting[: self._most], waiting[self._most :]
                outcome, problem = await self._send(engine, batch)
                self._counted(outcome, len(batch))
                if problem:
                    _log.debug("%s was not told of %d hand-offs: %s", engine.url, len(batch), problem)
                batch = []
        finally:
            if left := len(batch) + len(self._waiting.pop(engine, ())):
                self._counted(Sent.STOPPED, left)

    async def _send(self, engine: Engine, items: Sequence[Item]) -> tuple[Sent, str]:
        """How it went, and why not better."""
        params = self._params(engine, items)
        body = msgspec.json.encode(
            {"model": engine.model, "prompt": [0], "max_tokens": 1, "kv_transfer_params": params}
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
        except ConnectFailed as e:
            return Sent.UNREACHABLE, str(e)
        except UpstreamError as e:
            return Sent.NO_ANSWER, str(e)
        if answer.status != HTTPStatus.OK:
            return Sent.REFUSED, f"it answered with status {answer.status}"
        return Sent.DELIVERED, ""

"""Tells a decode worker that a hand-off it was sent is not wanted any more, so that the blocks need not wait for it.

For decode legs that ended before the first byte of their answer: the client left, the worker was given up, or it broke
off. Whether its engine had the request by then only that engine knows (`vllm_pd.given_up`): it tells the prefill worker
to let go of the blocks, or they end as the request does. A worker that is dead, or does not answer, may be reading all
the same: there the blocks' lease is what ends them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_pd.given_up import MAX_HANDOFFS, Handoff, give_up_params, handoff_in
from vllm_pd.router.engine_messages import Engine, EngineMessages, Sent, engine_of
from vllm_pd.router.metrics import RouterMetrics
from vllm_pd.router.transport import Upstream
from vllm_pd.state.base import WorkerRecord

NO_LEASE = "no_lease"
"""The transfer parameters do not say until when they may be used: they are of a worker without vllm-pd."""
UNKNOWN_ENGINE = "unknown_engine"
"""The decode worker does not say which engine it is, or the client chose one in a way of its own."""


@dataclass(frozen=True, slots=True)
class Handed:
    """Transfer parameters that a decode worker may have got."""

    record: WorkerRecord
    """The worker as it was then."""
    rank: int | None
    """Its engine; None: not known."""
    params: bytes = field(repr=False)
    """As JSON."""
    authorization: str = field(default="", repr=False)
    """The client's `Authorization`, for workers that check it themselves."""


class GiveUps:
    """Belongs to one router; used inside its event loop."""

    def __init__(self, upstream: Upstream, metrics: RouterMetrics, *, worker_key: str = "") -> None:
        self._metrics = metrics
        self._messages = EngineMessages[Handoff](
            upstream, _params, self._count, most=MAX_HANDOFFS, worker_key=worker_key
        )

    def give_up(self, handed: Handed) -> None:
        """Nobody waits for what would be computed with these blocks. Returns at once and never raises."""
        record = handed.record
        rank = handed.rank if record.dp_size > 1 else None
        handoff = handoff_in(handed.params)
        if not record.engine_id or (record.dp_size > 1 and rank is None):
            self._metrics.given_up.labels(UNKNOWN_ENGINE).inc()
        elif handoff is None:
            self._metrics.given_up.labels(NO_LEASE).inc()
        else:
            # So vLLM names the engines of a data-parallel worker.
            id = record.engine_id if rank is None else f"{record.engine_id}_dp{record.first_rank + rank}"
            self._messages.send(engine_of(record, rank, handed.authorization, id), handoff)

    async def close(self) -> None:
        """Give what is under way a moment, and drop the rest. Idempotent."""
        await self._messages.close()

    def _count(self, outcome: Sent, handoffs: int) -> None:
        self._metrics.given_up.labels(outcome).inc(handoffs)


def _params(engine: Engine, handoffs: Sequence[Handoff]) -> Mapping[str, Any]:
    return give_up_params(engine.id, handoffs)

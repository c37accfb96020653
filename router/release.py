"""Lets go of blocks that a prefill worker keeps for a hand-off which nobody will read.

Without it they stay until their lease ends, half a minute by default. Sent in the background: nobody waits for it, and
what does not arrive is what the lease is for.

A hold may be let go only if no decode worker can be reading it: its transfer parameters went to none, or only to
workers that refused the connection. For those that were sent to one there is `give_up`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_pd.holds import MAX_KEYS, RELEASE_FIELD
from vllm_pd.router.engine_messages import Engine, EngineMessages, Sent, engine_of
from vllm_pd.router.metrics import RouterMetrics
from vllm_pd.router.transport import Upstream
from vllm_pd.state.base import WorkerRecord


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


class Releases:
    """Belongs to one router; used inside its event loop."""

    def __init__(self, upstream: Upstream, metrics: RouterMetrics, *, worker_key: str = "") -> None:
        self._metrics = metrics
        self._messages = EngineMessages[str](upstream, _params, self._count, most=MAX_KEYS, worker_key=worker_key)

    def release(self, hold: Hold) -> None:
        """Have the blocks let go soon, also if they are still being computed. Returns at once and never raises;
        twice is the same as once."""
        record = hold.record
        if record.dp_size <= 1:
            ranks: tuple[int | None, ...] = (None,)
        else:
            ranks = tuple(range(record.dp_size)) if hold.rank is None else (hold.rank,)
        for rank in ranks:
            self._messages.send(engine_of(record, rank, hold.authorization), hold.key)

    async def close(self) -> None:
        """Give what is under way a moment, and drop the rest. Idempotent."""
        await self._messages.close()

    def _count(self, outcome: Sent, keys: int) -> None:
        self._metrics.releases.labels("released" if outcome is Sent.DELIVERED else "left_to_lease").inc(keys)


def _params(_: Engine, keys: Sequence[str]) -> Mapping[str, Any]:
    return {RELEASE_FIELD: keys}

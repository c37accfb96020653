"""Do the workers announce the blocks that this router expects them to hold?

When a request was sent whose blocks the router knows, its worker must announce one of them soon after the answer began.
If others are announced and these are not, router and engine hash in different ways. Pure: it is told what happens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_pd.block_hash import BlockKey
from vllm_pd.router.worker import Worker
from vllm_pd.state.base import WorkerId
from vllm_pd.state.block_index import Holder

ANNOUNCE_S = 5.0
"""An engine announces a block in the step that fills it, the agent and the store pass it on in far less than this."""
MISSES = 3
"""Requests in a row without an announcement before it counts: blocks can be evicted at once."""
PROVEN_S = 60.0
"""For how long one announcement is proof enough."""


@dataclass(slots=True)
class _Watched:
    keys: tuple[BlockKey, ...]
    seq: int
    until: float


class Announcements:
    """What was sent and what came of it, for every cache.

    Args:
        held: whether a cache is known to hold any of some blocks.
        seq: number of the newest change that a cache announced; it does not grow while events do not flow.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        held: Callable[[Holder, Sequence[BlockKey]], bool],
        seq: Callable[[Holder], int],
        clock: Callable[[], float],
    ) -> None:
        self._held = held
        self._seq = seq
        self._clock = clock
        self._watched: dict[Holder, _Watched] = {}
        self._misses: dict[Holder, int] = {}
        self._proven_until: dict[Holder, float] = {}

    def wants(self, holder: Holder) -> bool:
        """Whether the next request to this cache is worth watching."""
        return holder not in self._watched and self._proven_until.get(holder, 0.0) <= self._clock()

    def seq(self, holder: Holder) -> int:
        """Where a cache's announcements are now; to be asked before a prompt is sent, for `sent`."""
        return self._seq(holder)

    def sent(self, holder: Holder, keys: Sequence[BlockKey], seq: int) -> None:
        """A prompt of these blocks was sent to a cache that held none of them, and its answer has begun.

        `seq` is of before it was sent: an answer in one piece begins long after the blocks were announced.
        """
        if keys:
            # The first and the last: one of them is there if the hashes agree and nothing was evicted.
            self._watched[holder] = _Watched((keys[0], keys[-1]), seq, self._clock() + ANNOUNCE_S)

    def proven(self, holder: Holder) -> None:
        """Blocks that the router computed were found in what this cache announced."""
        self._proven_until[holder] = self._clock() + PROVEN_S
        self._misses.pop(holder, None)
        self._watched.pop(holder, None)

    def forget(self, worker: WorkerId) -> None:
        """The worker is another process now, or gone."""
        for known in (self._watched, self._misses, self._proven_until):
            for holder in [holder for holder in known if holder.worker == worker]:
                del known[holder]

    def problem(self, workers: Sequence[Worker]) -> str:
        """Look at what should have been announced by now. The worker that fails the proof as a sentence, or ""."""
        now = self._clock()
        ids = {worker.id for worker in workers}
        for holder, watched in list(self._watched.items()):
            if holder.worker not in ids:
                continue
            if self._held(holder, watched.keys):
                self.proven(holder)
            elif now >= watched.until:
                del self._watched[holder]
                if self._seq(holder) > watched.seq:
                    self._misses[holder] = self._misses.get(holder, 0) + 1
        worst = next(
            (holder for holder in self._misses if holder.worker in ids and self._misses[holder] >= MISSES), None
        )
        if worst is None:
            return ""
        return (
            f"worker {worst.worker} announces blocks, but none of the last {MISSES} prompts sent to it; run it and the "
            "router with one version of vllm-pd, and the worker without a PYTHONHASHSEED or hash setting of its own."
        )

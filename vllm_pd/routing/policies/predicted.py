"""`predicted`: where the first token comes soonest, minding the requests that come after this one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from vllm_pd.routing.model import NO_OVERLAP, Ask, Candidate, Overlaps
from vllm_pd.routing.predict import predict


@dataclass(frozen=True, slots=True)
class Predicted:
    """Seconds: work queued + own work * (1 + `work`) + what it does to the sequences that decode there.

    Own work counts more than once because it also makes those wait who come after: with equal times to the first
    token, the cluster is better off where less has to be computed.
    """

    name: ClassVar[str] = "predicted"
    work: float = 1.0
    """How much the delay of later requests counts against one's own."""
    disturbance: float = 0.02
    """How much a second of stall of one decoding sequence counts against a second of one's own waiting."""

    def scores(self, ask: Ask, candidates: Sequence[Candidate], overlaps: Overlaps, now: float) -> list[float]:
        tokens = ask.tokens
        most = (tokens - 1) // ask.block_size if tokens else 0
        size, weight, disturbance = ask.block_size, 1.0 + self.work, self.disturbance
        held = overlaps.get
        found: list[float] = []
        for candidate in candidates:
            rates = candidate.rates
            overlap = held(candidate.holder)
            if overlap is None:
                work = rates.prefill_base + tokens * rates.prefill_token + tokens * tokens * 0.5 * rates.prefill_square
            else:
                cached = min(overlap.gpu + overlap.cpu + overlap.ssd, most) * size
                work = rates.prefill(tokens - cached, cached)
                if overlap.cpu or overlap.ssd:
                    work += rates.load(overlap)
            queue = candidate.free_at - now
            if queue < candidate.least_wait:
                queue = candidate.least_wait
            found.append(queue + work * (weight + disturbance * candidate.decoding))
        return found

    def parts(
        self, index: int, ask: Ask, candidates: Sequence[Candidate], overlaps: Overlaps, now: float
    ) -> Mapping[str, float]:
        candidate = candidates[index]
        expected = predict(candidate, ask, overlaps.get(candidate.holder, NO_OVERLAP), now)
        work = expected.load + expected.prefill
        return {
            "queue": expected.queue,
            "load": expected.load,
            "prefill": expected.prefill,
            "later": work * self.work,
            "disturbance": work * self.disturbance * candidate.decoding,
        }

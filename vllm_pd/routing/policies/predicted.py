"""`predicted`: where the first token comes soonest, minding the requests that come after this one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from vllm_pd.routing.model import NO_OVERLAP, Ask, Candidate, Overlaps, Rates
from vllm_pd.routing.predict import LATENESS, overtaken, predict, turn


@dataclass(frozen=True, slots=True)
class Predicted:
    """Seconds: work queued before it + own work * (1 + `work`) + what that does to those that decode or wait there.

    Own work counts more than once because it also makes those wait who come after: with equal times to the first
    token, the cluster is better off where less has to be computed.
    """

    name: ClassVar[str] = "predicted"
    work: float = 1.0
    """How much the delay of later requests counts against one's own."""
    disturbance: float = 0.05
    """How much a second of stall of one decoding sequence counts against a second of one's own waiting."""
    patience: float = 2.0
    """Short requests first, where engines let the router decide: a request lets those go before it that come later by
    up to so many times its own work. 0: all in the order of arrival."""

    def scores(self, ask: Ask, candidates: Sequence[Candidate], overlaps: Overlaps, now: float) -> list[float]:
        tokens, size, most = ask.tokens, ask.block_size, ask.most_cached
        weight, disturbance, patience = 1.0 + self.work, self.disturbance, self.patience
        held = overlaps.get
        rates: Rates | None = None
        nothing_cached = 0.0
        found: list[float] = []
        for candidate in candidates:
            theirs = candidate.rates
            if theirs is not rates:
                # Mostly one object for all of a pool.
                rates, nothing_cached = theirs, theirs.prefill(tokens, 0)
            # A prompt that nobody holds is none to look for: what is looked up by is made of two parts.
            overlap = held(candidate.holder) if overlaps else None
            if overlap is None:
                blocks, work = 0, nothing_cached
            else:
                blocks = overlap.gpu + overlap.cpu + overlap.ssd
                cached = min(blocks, most) * size
                work = rates.prefill(tokens - cached, cached)
                if overlap.cpu or overlap.ssd:
                    work += rates.load(overlap)
            if candidate.promised:
                more = candidate.promised_after(blocks, ask)
                if more:
                    cached = min(blocks + more, most) * size
                    work = rates.prefill(tokens - cached, cached) + rates.load(overlap or NO_OVERLAP)
            queue = candidate.free_at - now
            least = candidate.least_wait
            if queue < least:
                # As in `predict.wait`.
                queue = least + LATENESS * (least - queue) if least else 0.0
            others = disturbance * candidate.decoding
            if candidate.turns:
                before, delayed = overtaken(candidate.turns, turn(now, patience, work))
                queue -= before
                others += delayed
            found.append(queue + work * (weight + others))
        return found

    def parts(
        self, index: int, ask: Ask, candidates: Sequence[Candidate], overlaps: Overlaps, now: float
    ) -> Mapping[str, float]:
        candidate = candidates[index]
        expected = predict(candidate, ask, overlaps.get(candidate.holder, NO_OVERLAP), now, self.patience)
        work = expected.load + expected.prefill
        delayed = overtaken(candidate.turns, turn(now, self.patience, work))[1]
        return {
            "queue": expected.queue,
            "load": expected.load,
            "prefill": expected.prefill,
            "later": work * self.work,
            "disturbance": work * self.disturbance * candidate.decoding,
            "overtaken": work * delayed,
        }

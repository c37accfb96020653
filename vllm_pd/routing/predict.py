"""Predicted times of a request on a candidate. Pure arithmetic on what the ledger and the index say."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_pd.routing.model import NO_OVERLAP, Ask, Candidate, Overlap, Overlaps


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds, each on its own; together they are the time to the first token."""

    queue: float
    load: float
    prefill: float

    @property
    def ttft(self) -> float:
        return self.queue + self.load + self.prefill


def overlap_on(candidate: Candidate, ask: Ask, overlaps: Overlaps) -> Overlap:
    """What the candidate's cache holds of the prompt, as far as that is known."""
    return overlaps.get(candidate.holder, NO_OVERLAP) if ask.exact else NO_OVERLAP


def wait(candidate: Candidate, now: float) -> float:
    """Seconds until the prefill work that is there is done."""
    return max(candidate.free_at - now, candidate.least_wait)


def predict(candidate: Candidate, ask: Ask, overlap: Overlap, now: float) -> Prediction:
    """The request computed whole on the candidate."""
    rates = candidate.rates
    cached = ask.cached(overlap)
    return Prediction(wait(candidate, now), rates.load(overlap), rates.prefill(ask.tokens - cached, cached))

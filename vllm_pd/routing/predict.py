"""Predicted work and times of a request on a candidate. Pure arithmetic on what the ledger and the index say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_pd.routing.model import NO_OVERLAP, Ask, Candidate, Overlap, Overlaps

LONGEST_PATIENCE = 60.0
"""Seconds. Whatever is predicted of its work, nothing that comes later than this goes before a request."""
LATENESS = 0.5
"""Seconds that overdue work is expected to need yet for every second that it is overdue."""


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


def cached_tokens(ask: Ask, blocks: int) -> int:
    """Prompt tokens that need not be computed where the first `blocks` are held or promised."""
    return min(blocks, ask.most_cached) * ask.block_size


def wait(candidate: Candidate, now: float) -> float:
    """Seconds until the prefill work that is there is done.

    What takes longer than predicted is expected to take longer yet, the more so the longer it did: a worker whose
    prediction failed must not look idle.
    """
    left, least = candidate.free_at - now, candidate.least_wait
    if left >= least:
        return left
    return least + LATENESS * (least - left) if least else 0.0


def turn(now: float, patience: float, work: float) -> float:
    """Of the requests that wait at an `ordered` engine, the one with the smallest is computed next: a request that
    came at `now` lets those go before it that come later by up to `patience` times its own `work` in seconds."""
    return now + min(patience * work, LONGEST_PATIENCE)


def overtaken(turns: Sequence[tuple[float, float]], own: float) -> tuple[float, int]:
    """Seconds of the waiting requests that a request with the turn `own` goes before, and how many they are."""
    seconds, count = 0.0, 0
    for theirs, work in reversed(turns):
        if theirs <= own:
            break
        seconds += work
        count += 1
    return seconds, count


def predict(candidate: Candidate, ask: Ask, overlap: Overlap, now: float, patience: float = 0.0) -> Prediction:
    """The request computed whole on the candidate. `patience` as for `EngineLedger.begin`."""
    rates = candidate.rates
    held = overlap.blocks
    cached = cached_tokens(ask, held + candidate.promised_after(held, ask))
    load, prefill = rates.load(overlap), rates.prefill(ask.tokens - cached, cached)
    queue = wait(candidate, now)
    if candidate.turns:
        queue -= overtaken(candidate.turns, turn(now, patience, load + prefill))[0]
    return Prediction(queue, load, prefill)

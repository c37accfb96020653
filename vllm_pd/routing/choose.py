"""Choosing one of several candidates: a pure function over what the router knows now."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from vllm_pd.routing.model import Ask, Candidate, Choice, Overlap, Overlaps, Scored
from vllm_pd.routing.policies.base import Policy
from vllm_pd.routing.predict import cached_tokens, overlap_on, predict


@dataclass(frozen=True, slots=True)
class Affinity:
    """A session stays on its worker while its predicted time there is within `factor` of the best or `margin` of it."""

    factor: float = 2.0
    margin: float = 0.1
    """Seconds."""


DEFAULT_AFFINITY = Affinity()

TimeToFirst = Callable[[Candidate, Overlap], float]
"""Predicts the seconds to the first token on a candidate that holds this much of the prompt."""


def choose(
    policy: Policy,
    ask: Ask,
    candidates: Sequence[Candidate],
    overlaps: Overlaps,
    now: float,
    *,
    temperature: float = 0.0,
    random: Random | None = None,
    affinity: Affinity = DEFAULT_AFFINITY,
    explain: bool = False,
    ttft: TimeToFirst | None = None,
) -> Choice:
    """The candidate that takes the request, on the clock of the candidates' ledgers.

    With a temperature above 0 the choice is drawn by `random`, which then is required; it is repeatable with a seed.
    `explain` fills in what was thought of every candidate. `ttft` predicts the time to the first token where that is
    not the time to compute the prompt there. Raises `ValueError` without candidates.
    """
    if not candidates:
        raise ValueError("There is no candidate to choose from")
    if not ask.exact:
        overlaps = {}
    expected = ttft or (lambda candidate, overlap: predict(candidate, ask, overlap, now, policy.patience).ttft)
    scores = policy.scores(ask, candidates, overlaps, now)
    chosen, reason = _pick(scores, candidates, temperature, random)
    if ask.session is not None:
        stays = _session(ask, candidates, overlaps, expected, affinity)
        if stays is not None:
            chosen, reason = stays, "session"

    def scored(index: int, parts: bool) -> Scored:
        candidate = candidates[index]
        overlap = overlap_on(candidate, ask, overlaps)
        promised = candidate.promised_after(overlap.blocks, ask) if ask.exact else 0
        return Scored(
            candidate.holder,
            overlap,
            promised,
            ask.tokens - cached_tokens(ask, overlap.blocks + promised),
            scores[index],
            expected(candidate, overlap),
            policy.parts(index, ask, candidates, overlaps, now) if parts else {},
        )

    if not explain:
        return Choice(chosen, scored(chosen, False), reason, policy.name, policy.patience)
    everyone = tuple(scored(index, True) for index in range(len(candidates)))
    return Choice(chosen, everyone[chosen], reason, policy.name, policy.patience, everyone)


def _pick(
    scores: list[float], candidates: Sequence[Candidate], temperature: float, random: Random | None
) -> tuple[int, str]:
    if len(scores) == 1:
        return 0, "only one"
    least = min(scores)
    if temperature > 0:
        if random is None:
            raise ValueError("A temperature needs a random generator")
        return _draw(scores, least, temperature, random), "temperature"
    chosen = scores.index(least)
    if scores.count(least) == 1:
        return chosen, "lowest"
    equals = (index for index, score in enumerate(scores) if score == least)
    return min(equals, key=lambda index: candidates[index].last_pick), "tie: picked longest ago"


def _draw(scores: list[float], least: float, temperature: float, random: Random) -> int:
    """Softmax over scores scaled to 0 to 1, so that a temperature means the same for every policy."""
    span = (max(scores) - least) * temperature
    if span <= 0:
        return random.randrange(len(scores))
    weights = [math.exp((least - score) / span) for score in scores]
    return random.choices(range(len(scores)), weights)[0]


def _session(
    ask: Ask, candidates: Sequence[Candidate], overlaps: Overlaps, expected: TimeToFirst, affinity: Affinity
) -> int | None:
    """The session's candidate if going there costs little; of several ranks of its worker the soonest."""
    if not any(candidate.holder.worker == ask.session for candidate in candidates):
        return None
    times = [expected(c, overlap_on(c, ask, overlaps)) for c in candidates]
    index = min((i for i, c in enumerate(candidates) if c.holder.worker == ask.session), key=times.__getitem__)
    best = min(times)
    return index if times[index] <= max(best * affinity.factor, best + affinity.margin) else None

"""What the cost gate remembers between prompts: which tiers it left alone lately, and when to try one again. Pure."""

from __future__ import annotations

from vllm_pd.kv_offload.cost_gate import Beliefs, Decision, Part, Reason, Tier

PROBE_SHARE = 1 / 16
"""Probes may cost so much of the time that is spent on computing refused blocks."""
_SURPRISE = 0.7
"""A load that took less than this share of what was predicted is followed by another: one is no rate."""
_MOST_LATE = 2
"""Loads in a row that come too late; then the tier is avoided, without waiting for its rate to be learned."""


class GateMemory:
    """Keeps a rate that was bad once from being believed for ever.

    A tier that is left alone is not measured. Each prompt that is computed instead therefore saves up a share of the
    time that this took, and when that pays for what a load is believed to cost more, the tier is tried.
    """

    def __init__(self) -> None:
        self._refused: set[Tier] = set()
        self._avoided: set[Tier] = set()
        self._late: dict[Tier, int] = {}
        self._saved_s: dict[Tier, float] = {}
        self._due: set[Tier] = set()

    @property
    def refused(self) -> frozenset[Tier]:
        """Tiers that the last prompts were not loaded from, because of what is believed of them."""
        return frozenset(self._refused)

    @property
    def avoided(self) -> frozenset[Tier]:
        """Tiers whose last loads were late."""
        return frozenset(self._avoided)

    @property
    def due(self) -> frozenset[Tier]:
        """Tiers to try again."""
        return frozenset(self._due)

    def decided(self, decision: Decision, beliefs: Beliefs) -> None:
        """A prompt went on as decided; once for each prompt."""
        loaded = set()
        at = 0
        for part in decision.parts:
            if part.load:
                loaded.add(part.run.tier)
                self._loads(part)
        late = next((part.run.tier for part in decision.parts if part.reason is Reason.LATE), None)
        if late is not None:
            self._was_late(late)
        for part in decision.parts:
            start, end = decision.prompt.end_of(at), decision.prompt.end_of(at + part.run.blocks)
            at += part.run.blocks
            if part.reason in (Reason.SLOWER, Reason.AVOIDED) and part.run.tier not in loaded:
                self._saves(part, beliefs.compute_s(end - start, start), beliefs)

    def loaded(self, tier: Tier, predicted_s: float, seconds: float) -> None:
        """A load from `tier` took `seconds`."""
        if tier in self._refused and seconds < predicted_s * _SURPRISE:
            self._due.add(tier)

    def _loads(self, part: Part) -> None:
        tier = part.run.tier
        if part.reason is Reason.FASTER:
            self._refused.discard(tier)
        self._avoided.discard(tier)
        self._late.pop(tier, None)
        self._tried(tier)

    def _was_late(self, tier: Tier) -> None:
        self._late[tier] = self._late.get(tier, 0) + 1
        if self._late[tier] >= _MOST_LATE:
            self._avoided.add(tier)
        self._tried(tier)

    def _tried(self, tier: Tier) -> None:
        self._saved_s.pop(tier, None)
        self._due.discard(tier)

    def _saves(self, part: Part, compute_s: float, beliefs: Beliefs) -> None:
        tier = part.run.tier
        # A load that is late is given up after as long as computing takes.
        extra_s = compute_s
        if part.reason is Reason.SLOWER:
            self._refused.add(tier)
            extra_s = min(extra_s, max(0.0, beliefs.load_s([part.run]) - compute_s))
        saved_s = self._saved_s[tier] = self._saved_s.get(tier, 0.0) + compute_s * PROBE_SHARE
        if saved_s >= extra_s:
            self._due.add(tier)

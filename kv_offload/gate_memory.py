"""What the cost gate remembers between prompts: which tiers it refused lately, and when to try one again. Pure."""

from __future__ import annotations

from vllm_pd.kv_offload.cost_gate import Beliefs, Decision, Reason, Tier

PROBE_SHARE = 1 / 16
"""Probes may cost so much of the time that is spent on computing refused blocks."""
_SURPRISE = 0.7
"""A load that took less than this share of what was predicted is followed by another: one is no rate."""


class GateMemory:
    """Keeps a rate that was bad once from being believed for ever.

    A tier that is refused is not measured. Each refusal therefore saves up a share of the time that computing took, and
    when that pays for what a load is believed to cost more, the tier is tried.
    """

    def __init__(self) -> None:
        self._refused: set[Tier] = set()
        self._saved_s: dict[Tier, float] = {}
        self._due: set[Tier] = set()

    @property
    def refused(self) -> frozenset[Tier]:
        """Tiers that the last prompts were not loaded from."""
        return frozenset(self._refused)

    @property
    def due(self) -> frozenset[Tier]:
        """Tiers to try again."""
        return frozenset(self._due)

    def decided(self, decision: Decision, beliefs: Beliefs) -> None:
        """A prompt went on as decided; once for each prompt."""
        loaded_tiers = {part.run.tier for part in decision.parts if part.load}
        for tier in loaded_tiers:
            if any(part.reason is Reason.FASTER for part in decision.parts if part.run.tier is tier):
                self._refused.discard(tier)
            self._saved_s.pop(tier, None)
            self._due.discard(tier)
        at = sum(part.run.blocks for part in decision.parts if part.load)
        for part in decision.parts:
            if part.load:
                continue
            start, end = decision.prompt.end_of(at), decision.prompt.end_of(at + part.run.blocks)
            at += part.run.blocks
            tier = part.run.tier
            if part.reason is not Reason.SLOWER or tier in loaded_tiers:
                continue
            self._refused.add(tier)
            compute_s = beliefs.compute_s(end - start, start)
            # One that turns out to be late is given up after as long as computing takes.
            extra_s = min(compute_s, max(0.0, beliefs.load_s([part.run]) - compute_s))
            saved_s = self._saved_s[tier] = self._saved_s.get(tier, 0.0) + compute_s * PROBE_SHARE
            if saved_s >= extra_s:
                self._due.add(tier)

    def loaded(self, tier: Tier, predicted_s: float, seconds: float) -> None:
        """A load from `tier` took `seconds`."""
        if tier in self._refused and seconds < predicted_s * _SURPRISE:
            self._due.add(tier)

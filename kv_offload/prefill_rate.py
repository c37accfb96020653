"""What computing prompt tokens costs in this engine, learned from the steps it makes."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_pd.linear_law import LinearLaw
from vllm_pd.routing.model import Rates

_DECODE_STEPS_PER_OBSERVATION = 8
"""Steps without prompt tokens are many and alike."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one step of the engine computes, over all its requests."""

    tokens: int = 0
    """Prompt tokens."""
    pairs: float = 0.0
    """Of each prompt token with those before it, as attention counts them."""
    decoding: int = 0
    """Requests that get their next token."""

    def plus_prompt(self, tokens: int, context: int) -> StepWork:
        """With `tokens` more prompt tokens that stand behind `context` others of their request."""
        return StepWork(self.tokens + tokens, self.pairs + pairs(tokens, context), self.decoding)


def pairs(tokens: int, context: int) -> float:
    """Pairs of `tokens` behind `context` others."""
    return tokens * (context + tokens * 0.5)


@dataclass(frozen=True, slots=True)
class PrefillSpeed:
    """Seconds of a step: `base_s`, and what each prompt token, each of its pairs and each decoding request adds."""

    base_s: float
    token_s: float
    pair_s: float
    sequence_s: float

    def added_s(self, tokens: int, context: int, step_tokens: int) -> float:
        """What computing `tokens` behind `context` others adds to a prompt of which at least one token is left.

        Args:
            step_tokens: most tokens of one step; what does not fit makes further steps.
        """
        return (
            tokens * self.token_s + pairs(tokens, context) * self.pair_s + tokens // max(1, step_tokens) * self.base_s
        )


class PrefillRate:
    """The engine's speed. Used by one thread. Starts from a prior for a GPU of the usual kind."""

    def __init__(self) -> None:
        prior = Rates()
        self._speed = PrefillSpeed(
            prior.step_base, prior.prefill_token, prior.prefill_context, sequence_s=prior.step_sequence
        )
        # The fixed part is the engine's, which is no slower because its tokens are.
        self._law = LinearLaw((prior.step_base, prior.prefill_token, prior.prefill_context, prior.step_sequence), (0,))
        self._prefills = 0
        self._decodes = 0

    @property
    def speed(self) -> PrefillSpeed:
        return self._speed

    @property
    def prefills(self) -> int:
        """Steps with prompt tokens that were observed."""
        return self._prefills

    def observe(self, work: StepWork, seconds: float) -> None:
        """A step with this `work` took `seconds`, none of which it waited for something else."""
        if seconds <= 0 or not (work.tokens or work.decoding):
            return
        if work.tokens:
            self._prefills += 1
        else:
            self._decodes += 1
            if self._decodes % _DECODE_STEPS_PER_OBSERVATION:
                return
        fitted = self._law.observe((1.0, float(work.tokens), work.pairs, float(work.decoding)), seconds)
        if fitted is not None:
            self._speed = PrefillSpeed(*fitted)

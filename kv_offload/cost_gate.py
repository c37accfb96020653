"""Whether to load a prompt's blocks from the tiers below the GPU or to compute them again. Pure.

A prompt's leading blocks lie on tiers in runs: so many on CPU, then so many on SSD, ... What is loaded is always a
prefix of them, since attention needs everything before a token. Within a run, the later a block the more its
computation costs while its load does not, so that loading part of a run is never best: the choice is after how many
runs to stop.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from vllm_pd.kv_offload.load_rates import LoadSpeed
from vllm_pd.kv_offload.prefill_rate import PrefillSpeed

BAND = 0.1
"""A tier that was loaded from goes on to be until it is so much slower than computing, and the other way round."""
_MOST_TOKENS = 1 << 20
"""Length up to which a break-even is looked for."""


class Tier(StrEnum):
    """Where a block lies."""

    CPU = "cpu"
    SSD = "ssd"
    COMING = "coming"
    """On its way already, for another request: it costs the wait for what is under way, and no second load."""


class Reason(StrEnum):
    """Why blocks are loaded or computed."""

    FASTER = "faster"
    UNKNOWN = "unknown"
    """Loaded to learn how long it takes: nothing was measured yet."""
    PROBE = "probe"
    """Loaded to learn whether it still takes so long."""
    ALWAYS = "always"
    SLOWER = "slower"
    LATE = "late"
    """The load was waited for longer than computing takes."""
    AVOIDED = "avoided"
    """The last loads from there were late."""
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive blocks on one tier."""

    tier: Tier
    blocks: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a request needs, in tokens; `runs` begin at the block that holds the first token not on the GPU."""

    tokens: int
    computed: int
    block_tokens: int
    runs: tuple[Run, ...]

    def end_of(self, blocks: int) -> int:
        """Tokens that are there once so many blocks of the runs are loaded."""
        if not blocks:
            return self.computed
        return min(self.tokens, (self.computed // self.block_tokens + blocks) * self.block_tokens)


@dataclass(frozen=True, slots=True)
class Beliefs:
    """What is known of the engine now. A speed is None where nothing was measured."""

    prefill: PrefillSpeed | None
    cpu: LoadSpeed | None
    ssd: LoadSpeed | None
    block_bytes: int
    step_tokens: int
    handover_s: float = 0.0
    """From the end of a load until the engine goes on with the request, with nothing else to do."""
    cpu_queued: int = 0
    """Bytes that are being loaded."""
    ssd_queued: int = 0

    def load_s(self, runs: Collection[Run]) -> float:
        """Seconds until the blocks of `runs` are on the GPU; a tier that is not known counts as 0."""
        blocks = sum(run.blocks for run in runs)
        if not blocks:
            return 0.0
        seconds = self.handover_s
        if self.cpu is not None:
            seconds += self.cpu.predict_s(blocks * self.block_bytes, self.cpu_queued)
        from_ssd = sum(run.blocks for run in runs if run.tier is Tier.SSD)
        awaited = any(run.tier is Tier.COMING for run in runs) and self.ssd_queued > 0
        if self.ssd is not None and (from_ssd or awaited):
            # By way of host memory, which is another hand-over.
            seconds += self.handover_s + self.ssd.predict_s(from_ssd * self.block_bytes, self.ssd_queued)
        return seconds

    def compute_s(self, tokens: int, context: int) -> float:
        """Seconds that computing `tokens` behind `context` others adds; 0 where nothing was measured."""
        return 0.0 if self.prefill is None else self.prefill.added_s(tokens, context, self.step_tokens)

    def speed_of(self, tier: Tier) -> LoadSpeed | None:
        return self.ssd if tier is Tier.SSD else self.cpu


@dataclass(frozen=True, slots=True)
class Part:
    """What happens to one run, and why."""

    run: Run
    load: bool
    reason: Reason


@dataclass(frozen=True, slots=True)
class Decision:
    """What happens to a prompt's blocks on the tiers."""

    prompt: Prompt
    parts: tuple[Part, ...]
    chosen_s: float
    """Predicted seconds of loading and computing as decided."""
    load_all_s: float
    compute_all_s: float

    @property
    def blocks(self) -> int:
        """Leading blocks to load."""
        return sum(part.run.blocks for part in self.parts if part.load)

    @property
    def loads_all(self) -> bool:
        return all(part.load for part in self.parts)

    @property
    def words(self) -> str:
        """The decision in one sentence."""
        parts = ", ".join(
            f"{'loads' if part.load else 'computes'} {part.run.blocks} blocks "
            f"{'that come' if part.run.tier is Tier.COMING else f'on {part.run.tier}'} ({part.reason})"
            for part in self.parts
        )
        return (
            f"{parts or 'nothing on the tiers'}; of {self.prompt.tokens} tokens {self.prompt.computed} are on the GPU; "
            f"predicted {_ms(self.chosen_s)}, loading all {_ms(self.load_all_s)}, "
            f"computing all {_ms(self.compute_all_s)}"
        )


def decide(
    prompt: Prompt,
    beliefs: Beliefs,
    *,
    refused: Collection[Tier] = (),
    avoided: Collection[Tier] = (),
    probe: Collection[Tier] = (),
) -> Decision:
    """After how many runs to stop loading.

    Args:
        refused: tiers that the last prompts were not loaded from, for the band.
        avoided: tiers to load nothing from, whatever is believed of them.
        probe: tiers to load from all the same.
    """
    runs = prompt.runs
    shunned = set(avoided) - set(probe)
    most = next((i for i, run in enumerate(runs) if run.tier in shunned), len(runs))
    reasons: dict[Tier, Reason] = {}
    for run in runs:
        if run.tier in probe:
            reasons[run.tier] = Reason.PROBE
        if beliefs.prefill is None or beliefs.speed_of(run.tier) is None:
            reasons[run.tier] = Reason.UNKNOWN
    least = max((i + 1 for i, run in enumerate(runs[:most]) if run.tier in reasons), default=0)
    load_s = [beliefs.load_s(runs[:stop]) for stop in range(len(runs) + 1)]
    compute_s = []
    blocks = 0
    for stop in range(len(runs) + 1):
        there = prompt.end_of(blocks)
        compute_s.append(beliefs.compute_s(prompt.tokens - there, there))
        if stop < len(runs):
            blocks += runs[stop].blocks
    leaning = [_leaning(runs[:stop], refused) for stop in range(len(runs) + 1)]
    # The later of two that cost the same: a load leaves the engine to others.
    stop = min(range(least, most + 1), key=lambda i: (load_s[i] * leaning[i] + compute_s[i], -i))
    parts = tuple(
        Part(run, True, reasons.get(run.tier, Reason.FASTER))
        if i < stop
        else Part(run, False, Reason.AVOIDED if run.tier in shunned else Reason.SLOWER)
        for i, run in enumerate(runs)
    )
    return Decision(prompt, parts, load_s[stop] + compute_s[stop], load_s[-1] + compute_s[-1], compute_s[0])


def told(prompt: Prompt, beliefs: Beliefs, load: int, loaded: Reason, computed: Reason) -> Decision:
    """A decision that was not the gate's: the first `load` blocks are loaded, the others computed."""
    parts = []
    left = load
    for run in prompt.runs:
        for blocks, loads in ((min(left, run.blocks), True), (max(0, run.blocks - left), False)):
            if blocks:
                parts.append(Part(Run(run.tier, blocks), loads, loaded if loads else computed))
        left = max(0, left - run.blocks)
    there = prompt.end_of(load)
    every = prompt.end_of(sum(run.blocks for run in prompt.runs))
    return Decision(
        prompt,
        tuple(parts),
        beliefs.load_s([part.run for part in parts if part.load]) + beliefs.compute_s(prompt.tokens - there, there),
        beliefs.load_s(prompt.runs) + beliefs.compute_s(prompt.tokens - every, every),
        beliefs.compute_s(prompt.tokens - prompt.computed, prompt.computed),
    )


def break_even_tokens(tier: Tier, beliefs: Beliefs, block_tokens: int) -> int | None:
    """Length, in whole blocks, from which on a prompt that lies on `tier` is loaded rather than computed.

    None where nothing was measured, or for a tier that never wins.
    """
    if beliefs.prefill is None or beliefs.speed_of(tier) is None:
        return None

    def wins(blocks: int) -> bool:
        return beliefs.load_s([Run(tier, blocks)]) <= beliefs.compute_s(blocks * block_tokens, 0)

    most = _MOST_TOKENS // block_tokens
    if not wins(most):
        return None
    least, most = 1, most
    while least < most:
        middle = (least + most) // 2
        least, most = (least, middle) if wins(middle) else (middle + 1, most)
    return most * block_tokens


def _leaning(runs: Collection[Run], refused: Collection[Tier]) -> float:
    """Factor on the time of a load, in favour of what was done lately."""
    return 1 + BAND if any(run.tier in refused for run in runs) else 1 - BAND


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms"

"""What goes into a modelled engine and what comes out of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vllm_pd.block_hash import BlockKey
from vllm_pd.tier_choices import DEFAULT_EVICTION


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Size of an engine and the scheduler settings of `vllm serve` with the same names."""

    gpu_blocks: int = 2048
    """With 512-token blocks a million tokens: the cache of Dynamo's mocker (16,384 blocks of 64)."""
    block_size: int = 512
    cpu_blocks: int = 0
    ssd_blocks: int = 0
    eviction: str = DEFAULT_EVICTION
    """Who evicts from host memory, as of `--pd-eviction`."""
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    scheduling_policy: str = "priority"
    """`fcfs` makes nothing of `Work.priority`."""


class Work:
    """One request in an engine. The constructor's arguments are the request; the rest is the engine's."""

    __slots__ = (
        "blocks",
        "cached",
        "computed",
        "cpu_hits",
        "ends_at",
        "generated",
        "gpu_hits",
        "hold",
        "keys",
        "loading",
        "named",
        "output",
        "preemptions",
        "priority",
        "prompt",
        "remote",
        "since",
        "ssd_hits",
        "start",
        "tag",
        "tokens",
        "version",
    )

    def __init__(
        self,
        tag: object,
        prompt: int,
        output: int,
        keys: Sequence[BlockKey],
        *,
        remote: bool = False,
        hold: bool = False,
        priority: float = 0.0,
    ) -> None:
        """Args:
        tag: whatever the owner likes.
        prompt: tokens.
        output: tokens to generate, at least 1.
        keys: of the prompt's whole blocks. The owner may append those of the answer as they become full.
        remote: another worker has computed the prompt, and its KV is fetched.
        hold: keep the blocks when finished, until `Engine.release`: another worker will fetch them.
        priority: of those that wait, the one with the smallest is taken first; of equals the one that came first.
        """
        self.tag = tag
        self.prompt = prompt
        self.output = output
        self.keys = keys
        self.remote = remote
        self.hold = hold
        self.priority = priority
        self.generated = 0
        self.tokens = prompt
        """Known tokens, as of `since` while it decodes."""
        self.computed = 0
        self.start = 0
        """Where this computation of the prompt began: what came from a cache or another worker lies before."""
        self.blocks: list[int] = []
        self.named = 0
        """Leading blocks whose key the pool knows."""
        self.loading = False
        self.since = 0
        self.ends_at = 0
        self.version = 0
        self.preemptions = 0
        self.gpu_hits = self.cpu_hits = self.ssd_hits = 0
        """Blocks found at the first admission."""
        self.cached = 0
        """Tokens not computed here at the first admission."""


@dataclass(slots=True)
class Step:
    """What the engine does next: `iterations` equal steps of `each` seconds."""

    started: float
    each: float
    iterations: int
    prefilled: Sequence[tuple[Work, int]]
    """Prompts computed in it, with how many tokens."""
    decoding: int
    """Sequences that each gain one token per iteration."""

    @property
    def seconds(self) -> float:
        return self.each * self.iterations

    @property
    def ends(self) -> float:
        return self.started + self.seconds


@dataclass(slots=True)
class Outcome:
    """What has happened up to now."""

    first_tokens: list[Work] = field(default_factory=list)
    """Requests that got their first token."""
    finished: list[Work] = field(default_factory=list)
    fetched: list[Work] = field(default_factory=list)
    """Remote requests whose KV has arrived: the worker that computed it may let go."""
    changed: Mapping[BlockKey, int] = field(default_factory=dict)
    """Key -> tier bits that hold now."""

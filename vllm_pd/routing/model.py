"""What a choice looks at. Times are seconds, lengths are tokens, blocks are whole KV blocks of the pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from vllm_pd.block_hash import BlockKey
from vllm_pd.routing.speed import NO_OVERLAP as NO_OVERLAP
from vllm_pd.routing.speed import Overlap as Overlap
from vllm_pd.routing.speed import Rates as Rates
from vllm_pd.state.base import PoolId, Role, WorkerId
from vllm_pd.state.block_index import Holder


@dataclass(frozen=True, slots=True)
class Ask:
    """What is known of a request when it is placed."""

    tokens: int
    """Prompt length; an estimate where `exact` is false."""
    block_size: int
    output_tokens: int = 0
    """Expected length of the answer; 0 when nothing is known."""
    exact: bool = True
    """Whether overlap is known. If not, no worker is credited with any."""
    keys: Sequence[BlockKey] = field(default=(), repr=False, compare=False)
    """Of its whole blocks, as looked up; what is being computed somewhere just now is found by them."""
    session: WorkerId | None = None
    """Where the request's session went last, by its affinity header."""

    @property
    def blocks(self) -> int:
        """Blocks that hold the prompt, the last one perhaps in part."""
        return -(-self.tokens // self.block_size)

    @property
    def most_cached(self) -> int:
        """Blocks that may come from a cache: the engine always computes the last token, and with it its block."""
        return (self.tokens - 1) // self.block_size if self.tokens else 0


class Candidate(Protocol):
    """One engine that may take the request, as its router sees it now: `EngineLedger`. Read only.

    Plain attributes, because a choice reads a few of each of hundreds of candidates.
    """

    @property
    def holder(self) -> Holder: ...
    @property
    def pool(self) -> PoolId: ...
    @property
    def role(self) -> Role: ...
    @property
    def free_at(self) -> float:
        """When the prefill work that is already there is predicted to be done, on the router's clock."""

    @property
    def promised(self) -> object:
        """True in a condition if `promised_after` may be above 0."""

    def promised_after(self, held: int, ask: Ask) -> int:
        """Blocks of the prompt after the first `held` that will be there when it is computed: requests before it that
        have no first token yet compute them."""

    @property
    def least_wait(self) -> float:
        """Seconds that this work takes at least from any time on: more than `free_at` says once that has passed."""

    @property
    def turns(self) -> Sequence[tuple[float, float]]:
        """This router's requests that wait there and may be overtaken, in the order in which they will be computed:
        the turn of each, and its predicted seconds. Empty where an engine takes requests as they come."""

    @property
    def prefill_tokens(self) -> int:
        """Uncached prompt tokens of requests that have no first token yet, other routers' included."""

    @property
    def running(self) -> int:
        """Requests being computed, by its own report corrected by what this router did since."""

    @property
    def waiting(self) -> int:
        """Requests in its queue, by its own report."""

    @property
    def decoding(self) -> int:
        """Requests past their first token: this router's, and what others run there at least, by its own report."""

    @property
    def active_blocks(self) -> int:
        """Blocks that this router's requests in progress refer to."""

    @property
    def kv_blocks(self) -> int:
        """Capacity; 0 when unknown."""

    @property
    def kv_usage(self) -> float:
        """Fraction of blocks in use by running requests, as reported, 0 to 1."""

    @property
    def begun(self) -> int:
        """Requests and blocks that this router sent since the report."""

    @property
    def begun_blocks(self) -> int: ...
    @property
    def inflight(self) -> int:
        """This router's own requests on it."""

    @property
    def last_pick(self) -> int:
        """Grows with every pick; the smallest was picked longest ago."""

    @property
    def rates(self) -> Rates: ...


Overlaps = Mapping[Holder, Overlap]
"""Only caches with an overlap are in it."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A candidate with what a policy thinks of it; everything that `explain` shows."""

    holder: Holder
    overlap: Overlap
    promised: int
    """Blocks after the overlap that will be there in time: a request before this one has them computed."""
    uncached: int
    """Prompt tokens to compute there."""
    score: float
    """The policy's own unit; smaller is better, whatever the original formula does."""
    ttft: float
    """Predicted seconds to the first token there, whatever the policy looks at."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named terms of the score: `queue`, `prefill`, `load`, `transfer`, `disturbance`, ..."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The outcome. `chosen` is an index into the candidates given."""

    chosen: int
    best: Scored
    """The chosen one."""
    reason: str
    """Why, in a few words: `lowest`, `session`, `tie: picked longest ago`, `temperature`, `only one`."""
    policy: str
    patience: float = 0.0
    """For `EngineLedger.begin`."""
    scored: tuple[Scored, ...] = ()
    """All candidates in the order given, where an explanation was asked for."""

"""What a planner remembers from one step to the next: values only, so that another process can take it over."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from vllm_pd.state.base import Epoch, Role, WorkerId


@dataclass(frozen=True, slots=True)
class Sample:
    """What a span of time brought, per second; output is what was asked of the decode workers."""

    seconds: float
    arrivals: float
    prompt_tokens: float
    uncached_tokens: float
    output_tokens: float
    held: float = 0.0
    """KV tokens of a sequence that was being decoded; 0 when not known."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """What came in equal spans of the clock that all planners share."""

    width_s: float
    index: int = 0
    """Number of the span that is being filled: those before lie without a gap before it."""
    sums: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    """Seconds that were seen of it, and each number of a sample times these."""
    packed: bytes = b""
    """Those that are full, oldest first: the numbers of a sample, of 32 bits each."""
    periods: tuple[int, ...] = (0, 0, 0, 0, 0)
    """After how many of them each returns; of tokens a second, those of one arrival. 0: not."""


@dataclass(frozen=True, slots=True)
class StepSample:
    """One look at the decode workers: sequences and thousands of KV tokens on each, and how long a token took."""

    sequences: float
    kv_kilotokens: float
    itl_s: float


@dataclass(frozen=True, slots=True)
class AskedMove:
    """A change of role that was asked for and has not been seen to end."""

    worker: WorkerId
    epoch: Epoch
    to: Role
    at: float
    seen: bool = False
    """Whether the worker has said that it is moving."""


@dataclass(frozen=True, slots=True)
class AskedRemoval:
    """A worker that was to be taken away and is still there."""

    worker: WorkerId
    epoch: Epoch
    at: float


@dataclass(frozen=True, slots=True)
class AskedStart:
    """Workers that were asked for and have not been seen."""

    role: Role
    count: int
    at: float


@dataclass(frozen=True, slots=True)
class Refused:
    """A worker that did not do what it was asked; it is left alone until then."""

    worker: WorkerId
    until: float


@dataclass(frozen=True, slots=True)
class LoadTally:
    """What the rule `dynamo-load` has seen of its present interval."""

    since: float = 0.0
    steps: int = 0
    queue_first: float = 0.0
    queue_last: float = 0.0
    queue_sum: float = 0.0
    kv_sum: float = 0.0
    workers: tuple[int, int] = (0, 0)
    """Prefill and decode workers when it began."""
    changed: bool = False
    """Whether these were others at some time in it."""
    grace: int = 0
    """Intervals for which no decode worker is taken away."""


@dataclass(frozen=True, slots=True)
class NeedSample:
    """How many workers a step wanted."""

    at: float
    workers: int
    at_hand: int = 0
    """How many there were; 0 in what a planner remembered that did not ask yet."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Times are on the planner's own clock, which only the time that really passed between two steps moves on."""

    clock: float = 0.0
    last_at: float | None = None
    """`PoolView.at_s` of the step before."""
    history: tuple[Sample, ...] = ()
    """Oldest first."""
    ages: tuple[Buckets, ...] = ()
    """What came over hours and days, in buckets of several widths."""
    steps: tuple[StepSample, ...] = ()
    workers: tuple[WorkerId, ...] = ()
    """Seen in the step before."""
    vanished_at: float | None = None
    """Since when most of the workers are missing that were there before."""
    asked_moves: tuple[AskedMove, ...] = ()
    asked_removals: tuple[AskedRemoval, ...] = ()
    asked_starts: tuple[AskedStart, ...] = ()
    refused: tuple[Refused, ...] = ()
    answer: float = 0.0
    """Tokens of the answers that ended lately, on average."""
    answers: float = 0.0
    """How many that average is of; those that ended longer ago count for less."""
    prefill_factor: float = 1.0
    """By how much more work prefilling and decoding turned out to be than the model of capacity says, from how many
    requests met their targets."""
    decode_factor: float = 1.0
    reserve: float = 1.0
    """How many times what is expected is planned for where workers are started and taken away."""
    enough_since: float | None = None
    """Since when those at work were expected to be enough."""
    held_tokens: float | None = None
    """KV tokens that a running sequence was seen to hold."""
    move_s: float | None = None
    """How long changes of role took, and starts; None until one was seen."""
    start_s: float | None = None
    startup_s: float | None = None
    """How long a start took the usual worker, as those that are there say."""
    moved_at: float | None = None
    moved_to: Role | None = None
    turns: float = 0.0
    """How often moves have turned to the other direction lately; each such turn counts for less as time passes."""
    needs: tuple[NeedSample, ...] = ()
    """How many workers the last steps wanted, for as long as is waited before any is taken away."""
    needs_since: float | None = None
    """Since when they are known, without a change that was not the planner's."""
    no_start_before: float = 0.0
    failed_starts: int = 0
    """In a row."""
    tally: LoadTally = LoadTally()


def encode_memory(memory: Memory) -> bytes:
    """As msgpack."""
    return msgspec.msgpack.encode(memory)


def decode_memory(data: bytes | None) -> Memory:
    """What `encode_memory` wrote; a fresh one for nothing and for what another version wrote."""
    if not data:
        return Memory()
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError:
        return Memory()


_decoder = msgspec.msgpack.Decoder(Memory)

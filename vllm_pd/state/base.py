"""Values and Protocol of the cluster registry.

Rules that every implementation keeps:
- A worker start is an epoch. A write of an older epoch than the stored one changes nothing and says so; a restart
  therefore never leaves a ghost, and a late message of a dead process cannot bring it back.
- A lease is measured by the store's clock, never by a client's: hosts may disagree about the time.
- A heartbeat carries the whole record, so a store that restarted empty is whole again after one heartbeat.
- A field has one writer: with several API server processes, each writes its own load entry.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType, Protocol

import msgspec

WorkerId = NewType("WorkerId", str)
"""Stable name of a worker: `host:port` of its advertised URL. Survives restarts; the epoch tells starts apart."""

Epoch = NewType("Epoch", int)
"""Start of a worker process in milliseconds since 1970; larger is newer."""

PoolId = NewType("PoolId", str)
"""16 hex digits: digest of everything that must be equal for two workers to share KV."""


class Role(StrEnum):
    """What a worker is asked to do. Every worker can do both; the role is a label."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"

    @property
    def prefills(self) -> bool:
        return self is not Role.DECODE

    @property
    def decodes(self) -> bool:
        return self is not Role.PREFILL


class MoveState(StrEnum):
    """How far a change of role has come."""

    DRAINING = "draining"
    """It does no new work; what it has finishes or is handed over."""
    DONE = "done"
    UNDONE = "undone"
    """It could not be done in time, or was taken back: the worker goes on in the role it had."""


@dataclass(frozen=True, slots=True)
class RoleMove:
    """The newest change of a worker's role, as the worker tells it: the only one who writes it."""

    id: str
    """Of the wish that it obeys."""
    to: Role
    by: str
    """Who wished it: `operator`, `planner`, ..."""
    state: MoveState
    since_ms: int
    """When it came into this state, the worker's clock, milliseconds since 1970."""
    took_ms: int = 0
    """From obeying the wish to the end of it; 0 while it lasts."""
    hand_over: bool = False
    """While it drains: routers are to have other workers go on with what it has begun, where that is exact."""
    detail: str = ""
    """Why it was undone, or what it waits for."""


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """What may share KV: two workers with an equal spec hold interchangeable blocks."""

    model: str
    revision: str
    dtype: str
    kv_dtype: str
    kv_layout: str
    block_size: int
    hash_algo: str
    engine: str
    """Version of vLLM: NIXL's handshake refuses a peer of another version."""
    hash_seed: str = ""
    """PYTHONHASHSEED of the workers where it is set: vLLM derives the hash of "no parent block" from it."""

    @property
    def id(self) -> PoolId:
        return PoolId(hashlib.sha256(msgspec.msgpack.encode(self)).hexdigest()[:16])


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """What a worker says about itself; constant for one epoch except `role`, `role_epoch` and `move`."""

    id: WorkerId
    epoch: Epoch
    pool: PoolSpec
    url: str
    """Base URL of its OpenAI API, `http://host:port` or `https://...`, without a trailing slash."""
    role: Role
    models: tuple[str, ...]
    """Names it answers to: served model names first, then LoRA adapters."""
    loras: tuple[str, ...] = ()
    """Those of `models` that are LoRA adapters: their name is part of every block hash."""
    lora_paths: tuple[str, ...] = ()
    """Where this worker found each of `loras`, in their order; part of every block hash too."""
    engine_id: str = ""
    nixl_host: str = ""
    """Empty when the worker cannot hand KV over (NIXL off)."""
    nixl_port: int = 0
    by_priority: bool = False
    """Whether its scheduler takes waiting requests by their `priority` (vLLM's --scheduling-policy priority)."""
    claims: bool = False
    """Whether its agent takes prefill jobs out of the store's queue; to one that does not, work is sent directly."""
    asks_key: bool = False
    """Whether its server wants an API key. A queued job carries none, so it must be the router that checked it."""
    dp_size: int = 1
    first_rank: int = 0
    """What vLLM adds to the rank in a request to name an engine: where several servers share the data-parallel ranks of
    a model, those of each begin where the former's end."""
    kv_blocks: int = 0
    """Blocks of GPU-side KV cache over all data-parallel ranks; 0 when unknown."""
    cpu_gib: float = 0.0
    ssd_gib: float = 0.0
    max_model_len: int = 0
    answer_cap: int = 0
    """Tokens that its server gives an answer at most, whatever a request asks for; 0: as many as fit."""
    default_answer_limit: int = 0
    """Tokens that a chat gets at most that names no limit; 0: as many as fit."""
    penalises_answers: bool = False
    """Whether its server's default sampling depends on the answer so far (presence or frequency penalty)."""
    tokenizer: str = ""
    """Hex SHA-256 under which the tokenizer files are in the store; empty when not published."""
    startup_s: float = 0.0
    """From the start of its process until it served; 0 when unknown."""
    versions: Mapping[str, str] = field(default_factory=dict)
    role_epoch: int = 0
    """How often its role has changed since its start."""
    move: RoleMove | None = None
    """The newest change of its role, under way or ended."""

    @property
    def moving_to(self) -> Role | None:
        """The role it is draining for; None when it does what its role says."""
        return self.move.to if self.move is not None and self.move.state is MoveState.DRAINING else None

    @property
    def can_transfer(self) -> bool:
        """Whether KV can be read from or into this worker over NIXL."""
        return bool(self.nixl_host)


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """Load of one engine (data-parallel rank) as its scheduler last reported it."""

    running: int
    waiting: int
    kv_usage: float
    """Fraction of KV blocks in use, 0 to 1."""
    at_ms: int
    """When the reporting process saw it, its own clock, milliseconds since 1970."""


@dataclass(frozen=True, slots=True)
class RouterWork:
    """What one router has sent to a worker and not seen the end of."""

    prefill_tokens: int
    """Prompt tokens to compute of requests whose first token has not come."""
    requests: int
    """How many requests these are of."""


@dataclass(frozen=True, slots=True)
class WorkerState:
    """A live worker with the newest load of each of its engines (data-parallel rank -> load)."""

    record: WorkerRecord
    lease_left_ms: int
    loads: Mapping[int, WorkerLoad] = field(default_factory=dict)
    others: Mapping[str, RouterWork] = field(default_factory=dict)
    """Router id -> its work on this worker, for each router that published some; a router leaves itself out."""

    @property
    def running(self) -> int:
        return sum(load.running for load in self.loads.values())

    @property
    def waiting(self) -> int:
        return sum(load.waiting for load in self.loads.values())

    @property
    def kv_usage(self) -> float:
        return max((load.kv_usage for load in self.loads.values()), default=0.0)


@dataclass(frozen=True, slots=True)
class RegistrySnapshot:
    """Every live worker of a namespace, over all pools, ordered by id."""

    workers: tuple[WorkerState, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What a router needs to render and tokenize a prompt as the worker does."""

    tokenizer_json: bytes
    tokenizer_config: bytes = b""
    """tokenizer_config.json: special tokens and flags that the template and the tokenizer refer to."""
    chat_template: str = ""
    """Jinja source of the template the worker serves with; empty when the model has none."""
    tool_template: str = ""
    """The template for requests that bring tools; empty when it is the same one."""
    content_format: str = ""
    """How the worker hands messages to the template: `string`, `openai` (lists of parts); empty when not known."""
    tool_content_format: str = ""
    """The same for `tool_template`."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """Names under which templates read special tokens; if empty, they are taken from `tokenizer_config`."""
    template_kwargs: str = ""
    """JSON of the worker's `--default-chat-template-kwargs`; empty when it has none."""
    drops_unused_tools: bool = False
    """The worker keeps tools out of the prompt when `tool_choice` is "none"."""

    @property
    def sha(self) -> str:
        return hashlib.sha256(msgspec.msgpack.encode(self)).hexdigest()


class HeartbeatResult(StrEnum):
    """What the store said to a heartbeat."""

    NEW = "new"
    """The worker was not registered (first time, lease expired, or the store came back empty)."""
    RENEWED = "renewed"
    STALE = "stale"
    """A newer epoch holds this id: another process serves under the same advertised URL."""


class Registry(Protocol):
    """Who is alive. Every method has a deadline of its own and raises `StoreError` when the store does not answer."""

    async def heartbeat(self, record: WorkerRecord, lease_ms: int) -> HeartbeatResult:
        """Register or renew. Atomic. Idempotent. Writes the whole record."""

    async def publish_load(
        self, worker: WorkerId, pool: PoolId, writer: int, loads: Mapping[int, WorkerLoad], ttl_ms: int
    ) -> None:
        """Replace the load entry of one API server process (`writer` is its rank). Best effort: last write wins."""

    async def publish_inflight(
        self, router_id: str, pool: PoolId, work: Mapping[WorkerId, RouterWork], ttl_ms: int
    ) -> None:
        """Replace what one router says about its work on the workers of a pool. Best effort: last write wins."""

    async def withdraw(self, worker: WorkerId, pool: PoolId, epoch: Epoch) -> bool:
        """Remove the worker if `epoch` is still the stored one. Returns whether it was removed. Idempotent."""

    async def snapshot(self) -> RegistrySnapshot:
        """All live workers. A worker whose lease ran out is absent even if nobody removed it."""

    async def find(self, worker: WorkerId, pool: PoolId) -> WorkerState | None:
        """One worker, None unless it is alive; what routers have sent it (`others`) is left out. It costs the same in a
        cluster of any size."""

    async def put_tokenizer(self, pool: PoolId, files: TokenizerFiles, ttl_ms: int) -> str:
        """Store the files once per content, (re)starting their time to live. Returns the hex SHA-256."""

    async def get_tokenizer(self, pool: PoolId, sha: str) -> TokenizerFiles | None:
        """The files, or None when absent or when their content does not match `sha`."""

    async def close(self) -> None:
        """Release connections. Idempotent."""

"""What an agent is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from vllm_pd.agent.kv_event_source import EventEndpoints
from vllm_pd.agent.readiness import OwnServer
from vllm_pd.state.base import TokenizerFiles, WorkerRecord
from vllm_pd.state.prefill_queue import PrefillQueue


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSpec:
    """How a worker does prefill jobs of the store's queue.

    Attributes:
        open_queue: makes the queue; called in the agent's thread, so its connections belong to that loop.
        server: where they are sent: this process's own server.
        api_key: what that server wants to see; empty for none.
        budget_tokens: prompt tokens of jobs that it holds at a time.
        progress_known: whether every report of the engines reaches this process, see `EngineProgress`.
        grace_s: how long jobs may go on when the worker shuts down.
    """

    open_queue: Callable[[], PrefillQueue]
    server: OwnServer
    api_key: str = field(default="", repr=False)
    budget_tokens: int
    progress_known: bool = True
    grace_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSpec:
    """One agent of one API server process.

    Attributes:
        store: the store's URL, for messages only (its password is hidden there).
        record: what to register; `tokenizer` and `startup_s` are filled in by the agent.
        writer: rank of this API server process: the load field it owns.
        is_registrar: whether this process registers the worker. One of several API servers does; all publish loads.
        lease_s: after how many seconds without a heartbeat routers forget the worker.
        event_sources: the engines, and where each publishes its KV events; asked now and then, in the agent's thread.
        load_tokenizer: reads the tokenizer files (None: there are none); called in the agent's thread.
        prefill: how it does prefill jobs; None: it claims none.
        age_s: for how many seconds this process has run; 0 when unknown.
    """

    store: str
    record: WorkerRecord
    writer: int = 0
    is_registrar: bool = True
    lease_s: float = 10.0
    event_sources: Callable[[], Mapping[int, EventEndpoints]] = dict
    load_tokenizer: Callable[[], TokenizerFiles | None] = lambda: None
    prefill: PrefillSpec | None = None
    age_s: Callable[[], float] = lambda: 0.0

    @property
    def lease_ms(self) -> int:
        return int(self.lease_s * 1000)

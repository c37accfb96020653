"""What an agent is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vllm_pd.agent.kv_event_source import EventEndpoints
from vllm_pd.state.base import TokenizerFiles, WorkerRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSpec:
    """One agent of one API server process.

    Attributes:
        store: the store's URL, for messages only (its password is hidden there).
        record: what to register; `tokenizer` is filled in by the agent.
        writer: rank of this API server process: the load field it owns.
        is_registrar: whether this process registers the worker. One of several API servers does; all publish loads.
        lease_s: after how many seconds without a heartbeat routers forget the worker.
        event_sources: the engines, and where each publishes its KV events; asked now and then, in the agent's thread.
        load_tokenizer: reads the tokenizer files (None: there are none); called in the agent's thread.
    """

    store: str
    record: WorkerRecord
    writer: int = 0
    is_registrar: bool = True
    lease_s: float = 10.0
    event_sources: Callable[[], Mapping[int, EventEndpoints]] = dict
    load_tokenizer: Callable[[], TokenizerFiles | None] = lambda: None

    @property
    def lease_ms(self) -> int:
        return int(self.lease_s * 1000)

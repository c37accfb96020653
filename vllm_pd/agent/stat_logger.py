"""The stat logger that hosts the agent: vLLM tells it when the engine is up and, at each step, its load.

vLLM tells stat loggers nothing about the end. The engine client's `shutdown` is the first thing of every way in which
an API server ends (SIGTERM, SIGINT, a dead engine), before a drain begins, so the agent is stopped from there: a router
stops sending requests while those under way are finished. An exit handler is the net under ends that skip it.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
from typing import Any

from vllm_pd import __version__
from vllm_pd import vllm_compat as compat
from vllm_pd.agent import runtime
from vllm_pd.agent.agent import Agent
from vllm_pd.agent.answer_defaults import answer_defaults
from vllm_pd.agent.event_sources import event_endpoints
from vllm_pd.agent.identity import new_epoch, pool_spec, worker_id
from vllm_pd.agent.kv_event_source import EventEndpoints
from vllm_pd.agent.prefill_rules import budget_tokens
from vllm_pd.agent.readiness import OwnServer
from vllm_pd.agent.runtime import RuntimeConfig
from vllm_pd.agent.spec import AgentSpec, PrefillSpec
from vllm_pd.agent.tokenizer_files import served_tokenizer_files
from vllm_pd.graph.proc_tree import own_age_s
from vllm_pd.state.base import WorkerRecord
from vllm_pd.state.open_registry import open_block_index, open_prefill_queue, open_registry, open_roles
from vllm_pd.vllm_compat.version import vllm_version

logger = logging.getLogger("vllm.vllm_pd")

STORE_TIMEOUT_S = 2.0
"""Nobody waits for the agent, and under load its thread gets little of the interpreter: be patient."""


class PDStatLogger(compat.AggregateStatLoggerBase):  # type: ignore[misc]
    """Feeds and hosts the agent of this API server process; does nothing when no store is configured."""

    def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:
        self._vllm_config = vllm_config
        self._engines = len(engine_indexes)
        self._first = engine_indexes[0] if engine_indexes else 0
        self._config = runtime.configured()
        self._agent: Agent | None = None

    def record(
        self,
        scheduler_stats: Any | None,
        iteration_stats: Any | None,
        mm_cache_stats: Any | None = None,
        engine_idx: int = 0,
    ) -> None:
        if self._agent is not None and scheduler_stats is not None:
            self._agent.observe(
                engine_idx - self._first,
                scheduler_stats.num_running_reqs,
                scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs,
                scheduler_stats.kv_cache_usage,
            )

    def log_engine_initialized(self) -> None:
        """Start the agent; it registers once the HTTP server answers. Called again after the engine was rescaled."""
        if self._config is None or self._agent is not None:
            return
        config = self._config
        agent = Agent(
            agent_spec(config, self._vllm_config, self._engines),
            lambda: open_registry(config.store, config.namespace, timeout_s=STORE_TIMEOUT_S),
            lambda: open_block_index(config.store, config.namespace, timeout_s=STORE_TIMEOUT_S),
            _own_server(config).serves,
            lambda: open_roles(config.store, config.namespace, timeout_s=STORE_TIMEOUT_S),
        )
        _stop_at_shutdown(agent)
        agent.start()
        self._agent = agent


def agent_spec(config: RuntimeConfig, vllm_config: Any, engines: int) -> AgentSpec:
    """What this API server registers and publishes, from its own settings and a started engine's configuration."""
    model, transfer = vllm_config.model_config, vllm_config.kv_transfer_config
    rank = max(0, vllm_config.parallel_config._api_process_rank)
    vllm = vllm_version()
    url = config.url()
    prefill = _prefill_spec(config, vllm_config, engines)
    answers = answer_defaults(model)
    record = WorkerRecord(
        id=worker_id(url),
        epoch=new_epoch(),
        pool=pool_spec(vllm_config, vllm, os.environ.get("PYTHONHASHSEED", "")),
        url=url,
        role=config.role,
        models=(config.models or (str(model.model),)) + config.loras,
        loras=config.loras,
        lora_paths=config.lora_paths,
        engine_id=str(transfer.engine_id) if transfer is not None else "",
        nixl_host=config.nixl_host,
        nixl_port=config.nixl_port,
        claims=prefill is not None,
        asks_key=bool(config.api_key),
        by_priority=vllm_config.scheduler_config.policy == "priority",
        dp_size=engines,
        first_rank=int(vllm_config.parallel_config.data_parallel_rank),
        # The engine client has summed it over the engines it talks to.
        kv_blocks=int(vllm_config.cache_config.num_gpu_blocks or 0),
        cpu_gib=config.cpu_gib,
        ssd_gib=config.ssd_gib,
        max_model_len=int(model.max_model_len),
        answer_cap=answers.answer_cap,
        default_answer_limit=answers.default_answer_limit,
        penalises_answers=answers.penalises_answers,
        versions={"vllm": vllm, "vllm-pd": __version__},
    )
    return AgentSpec(
        store=config.store,
        record=record,
        writer=rank,
        is_registrar=rank == 0,
        lease_s=config.lease_s,
        event_sources=functools.partial(_event_sources, vllm_config) if config.kv_events else dict,
        load_tokenizer=functools.partial(served_tokenizer_files, model, config.rendering),
        prefill=prefill,
        age_s=own_age_s,
    )


def _own_server(config: RuntimeConfig) -> OwnServer:
    return OwnServer(host=config.host, port=config.port, uds=config.uds, tls=config.tls)


def _prefill_spec(config: RuntimeConfig, vllm_config: Any, engines: int) -> PrefillSpec | None:
    """How this worker does jobs of the prefill queue when its role has it prefill; None if it cannot."""
    if not config.nixl_host:
        return None
    if config.asks_certificate or (config.uds and config.tls):
        logger.warning(
            "vllm-pd: this worker takes no jobs from the prefill queue, since it cannot send them to its own server "
            "(%s); routers send it prefill work directly.",
            "which wants certificates of its clients" if config.asks_certificate else "TLS on a Unix socket",
        )
        return None
    scheduler, parallel = vllm_config.scheduler_config, vllm_config.parallel_config
    return PrefillSpec(
        open_queue=functools.partial(open_prefill_queue, config.store, config.namespace, timeout_s=STORE_TIMEOUT_S),
        server=_own_server(config),
        api_key=config.api_key,
        budget_tokens=budget_tokens(config.prefill_budget_tokens, scheduler.max_num_batched_tokens, engines),
        progress_known=parallel._api_process_count == 1,
        grace_s=vllm_config.shutdown_timeout,
    )


def _event_sources(vllm_config: Any) -> dict[int, EventEndpoints]:
    """Engine -> where it publishes. Engines are numbered as requests name them: from 0, also where the data-parallel
    ranks of this server begin later."""
    client, asked = runtime.engine(), vllm_config.kv_events_config
    if client is None or asked is None or not compat.ZmqEventPublisher._is_bind_endpoint(asked.endpoint):
        # An engine that connects to somebody's collector publishes to nobody else.
        return {}
    parallel = vllm_config.parallel_config
    first = parallel.data_parallel_rank
    local = range(first, first + parallel.data_parallel_size_local)
    endpoints = event_endpoints(client.get_kv_event_sources(), local)
    return {rank - first: where for rank, where in endpoints.items()}


def _stop_at_shutdown(agent: Agent) -> None:
    """Have `agent` stopped as the first act of the engine client's shutdown, and at exit at the latest."""
    original = compat.AsyncLLM.shutdown

    @functools.wraps(original)
    def shutdown_after_agent(self: Any, *args: Any, **kwargs: Any) -> Any:
        agent.stop()
        return original(self, *args, **kwargs)

    compat.AsyncLLM.shutdown = shutdown_after_agent
    atexit.register(functools.partial(agent.stop, wait_for_jobs=True))

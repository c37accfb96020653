"""What we use of the engine: its scheduler and its requests' blocks, the events that it publishes, its platform."""

from __future__ import annotations

from vllm_pd.vllm_compat.internal import Internal

ENGINE: tuple[Internal, ...] = (
    Internal(
        "CpuPlatform",
        "vllm.platforms.cpu",
        "CpuPlatform",
        ("discover_numa_topology()",),
        "asked by the NIXL worker for a core to pin the main thread to; on CPU it must answer none",
    ),
    Internal(
        "SpinCondition",
        "vllm.distributed.device_communicators.shm_broadcast",
        "SpinCondition",
        ("wait(timeout_ms)", "last_read", "busy_loop_s"),
        "how long a reader of shared memory polls before it waits",
    ),
    Internal(
        "EngineCore",
        "vllm.v1.engine.core",
        "EngineCore",
        ("collective_rpc(method, timeout, args, kwargs)", "scheduler"),
        "weights are changed by calls to its workers, after which blocks on the SSD are of other weights",
    ),
    Internal(
        "RequestStatus",
        "vllm.v1.request",
        "RequestStatus",
        ("PREEMPTED",),
        "a preempted request asks for blocks again; one whose load failed must not",
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
)

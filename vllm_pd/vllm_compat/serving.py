"""What we use of the server: its options, its life, its tokenizer and templates, its statistics."""

from __future__ import annotations

from vllm_pd.vllm_compat.internal import Internal

SERVING: tuple[Internal, ...] = (
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
        "vllm_config_class",
        "vllm.config.utils",
        "config",
        ("__call__(cls)",),
        "decorates our subclass of KVTransferConfig",
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
    Internal(
        "AsyncLLM",
        "vllm.v1.engine.async_llm",
        "AsyncLLM",
        ("shutdown(timeout)", "get_kv_event_sources()"),
        "its shutdown is the first act of an API server's end, at which the worker is withdrawn; it knows where each "
        "engine publishes its KV events",
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

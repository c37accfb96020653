"""Rows on caches: hits by tier, what tiers move, the block index."""

from __future__ import annotations

from deploy.grafana.model import Panel, Query, Row
from deploy.grafana.promql import FROM_CACHES, OF_WORKERS, POOL, WORKER, of_stores, quantile, rate, ratio, troubles
from deploy.grafana.shapes import counted, of_each_worker, summed, troubled

_SOURCES = "vllm:prompt_tokens_by_source_total"
_CACHED = "vllm:prompt_tokens_cached_by_source_total"
_PROMPTS = "vllm:prompt_tokens_total"
_INDEX = "vllm_pd_router_index"

CACHES = Row(
    "Caches and tiers",
    (
        Panel(
            "Hit rate by tier",
            "Part of all prompt tokens that each tier supplied: device is the GPU, host the CPU tier, disk the SSD, "
            "external_unspecified and p2p what other workers handed over.",
            (
                Query(
                    f"sum by (source) ({rate(_CACHED, OF_WORKERS)}) / on () group_left () "
                    f"(sum({rate(_PROMPTS, OF_WORKERS)}) > 0)",
                    "{{source}}",
                ),
            ),
            "percentunit",
            stacked=True,
        ),
        Panel(
            "Hit rate of each worker",
            "Part of its prompt tokens that it did not compute. One far below the others of its role: its cache was "
            "reset, or its events do not arrive (row Store and index).",
            (
                Query(
                    ratio(rate(_SOURCES, f"{OF_WORKERS}, {FROM_CACHES}"), rate(_SOURCES, OF_WORKERS), "worker"),
                    "{{worker}}",
                ),
            ),
            "percentunit",
            high=1.0,
        ),
        counted(
            "Cached tokens: foretold and found",
            "What the router counted on, and what the answers said (vLLM's --enable-prompt-tokens-details). Apart: "
            "the index is behind, or prompts are hashed in another way.",
            "source",
            "vllm_pd_router_cached_tokens_total",
            unit="cps",
        ),
        Panel(
            "Blocks by tier",
            "What routers know to be cached, over all workers.",
            (Query(f"sum by (tier) ({of_stores(f'{_INDEX}_blocks', WORKER, 'worker', 'rank', 'tier')})", "{{tier}}"),),
        ),
        summed(
            "CPU tier",
            "Bytes between GPU and host memory.",
            {"loaded": "vllm:kv_offload_load_bytes_total", "stored": "vllm:kv_offload_store_bytes_total"},
            OF_WORKERS,
            "Bps",
        ),
        of_each_worker(
            "CPU tier in use",
            "Part of the host memory tier that holds blocks; a full one is normal.",
            "vllm:kv_offload_cpu_cache_usage_perc",
            "percentunit",
            high=1.0,
        ),
        summed(
            "SSD tier",
            "Bytes written and read.",
            {"read": "vllm_pd_ssd_read_bytes_total", "written": "vllm_pd_ssd_written_bytes_total"},
            OF_WORKERS,
            "Bps",
        ),
        Panel(
            "SSD tier: space",
            "Size of its files; dashed: what it may use.",
            (
                Query(f"max by (worker) (vllm_pd_ssd_used_bytes{{{OF_WORKERS}}})", "{{worker}}"),
                Query(f"max(vllm_pd_ssd_budget_bytes{{{OF_WORKERS}}})", "budget", dashed=True),
            ),
            "bytes",
        ),
        Panel(
            "SSD tier: trouble",
            "failed: blocks that could not be loaded, by why, and are computed. refused: not taken over; first_time "
            "is the filter that spares the disk. off: a direction is switched off because it kept failing.",
            (
                Query(troubles("reason", "vllm_pd_ssd_loads_failed_blocks_total", OF_WORKERS), "failed, {{reason}}"),
                Query(troubles("reason", "vllm_pd_ssd_refused_blocks_total", OF_WORKERS), "refused, {{reason}}"),
                Query(f"sum by (direction) (vllm_pd_ssd_off{{{OF_WORKERS}}})", "off, {{direction}}"),
            ),
        ),
        counted(
            "Load or compute",
            "Blocks found on a tier, by what was done: compute where that was expected to be faster.",
            "tier, decision",
            "vllm_pd_offload_gate_blocks_total",
            OF_WORKERS,
        ),
        Panel(
            "Break-even of a load",
            "Prompt tokens from which on loading from the tier is believed to win; 0: never.",
            (
                Query(
                    f"max by (worker, tier) (vllm_pd_offload_break_even_tokens{{{OF_WORKERS}}})", "{{worker}}, {{tier}}"
                ),
            ),
        ),
        Panel(
            "Lookups of a prompt",
            "Time in the block index, and in rendering, tokenizing and hashing the prompt before.",
            (
                Query(quantile(0.99, "vllm_pd_router_lookup_seconds"), "lookup p99"),
                Query(quantile(0.5, "vllm_pd_router_hashing_seconds"), "hashing p50"),
                Query(quantile(0.99, "vllm_pd_router_hashing_seconds"), "hashing p99"),
            ),
            "s",
        ),
    ),
)

STORE = Row(
    "Store and block index",
    (
        Panel(
            "Store reached",
            "1: the router (or planner) reaches it. At 0 all serves from memory: no worker joins, no role moves.",
            (
                Query("vllm_pd_router_store_up", "router {{instance}}"),
                Query("vllm_pd_planner_store_up", "planner {{instance}}"),
            ),
            high=1.0,
        ),
        Panel(
            "Age of the index",
            "Since the router was as new as the store. Seconds: the store or the router is slow.",
            (Query(of_stores(f"{_INDEX}_age_seconds", POOL, "pool"), "{{pool}}"),),
            "s",
        ),
        of_each_worker(
            "Delay of the workers",
            "How long a worker's newest changes had waited before the store had them.",
            "vllm_pd_agent_delay_seconds",
            "s",
        ),
        summed(
            "Changes of the index",
            "Blocks that routers took in; snapshots and gaps: caches that were read whole, which costs.",
            {
                "blocks": f"{_INDEX}_changed_blocks_total",
                "snapshots": f"{_INDEX}_snapshots_total",
                "gaps": f"{_INDEX}_gaps_total",
            },
            POOL,
        ),
        summed(
            "Trouble of the workers' agents",
            "losses: all known of an engine's cache was forgotten. gaps: events were missing. errors: the store "
            "refused a write. unreadable: events that were not understood.",
            {
                name.rpartition("_")[2]: f"vllm_pd_agent_{name}_total"
                for name in ("kv_losses", "kv_gaps", "index_errors", "kv_unreadable")
            },
            OF_WORKERS,
        ),
        troubled(
            "Prompts that are not looked up",
            "By why: such prompts go where the load is low. hash_mismatch is an alert of its own.",
            "reason",
            "vllm_pd_router_unknown_prompts_total",
        ),
    ),
)

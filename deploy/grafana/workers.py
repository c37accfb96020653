"""Rows on workers: roles and loads, the prefill queue, hand-overs."""

from __future__ import annotations

from deploy.grafana.model import Kind, Panel, Query, Row
from deploy.grafana.promql import (
    OF_WORKERS,
    POOL,
    WORKER,
    by,
    count_of_role,
    mean,
    of_stores,
    quantile,
    rate,
)
from deploy.grafana.shapes import counted, of_each_worker, summed, timed, troubled

_ROLES = {
    0: ("left out", "red"),
    1: ("prefill", "blue"),
    2: ("decode", "green"),
    3: ("both", "purple"),
}
_INFO = "vllm_pd_router_worker_info"
_QUEUE = "vllm_pd_router_prefill_queue"
_BYTES = "vllm:nixl_bytes_transferred"
_TRANSFER = "vllm:nixl_xfer_time_seconds"


def _role_over_time() -> str:
    """A number of `_ROLES` for each worker."""
    role = " or ".join(
        f'{place} * max by (worker) ({_INFO}{{role="{name}", {OF_WORKERS}}})'
        for place, (name, _) in _ROLES.items()
        if place
    )
    return f"({role}) * on (worker) min by (worker) (vllm_pd_router_worker_usable)"


def _load(q: str) -> str:
    return f"{q}(sum by (worker) (vllm:num_requests_running{{{POOL}}} + vllm:num_requests_waiting{{{POOL}}}))"


WORKERS = Row(
    "Workers, roles, loads",
    (
        Panel(
            "Role of each worker",
            "Red: left out, because it is down, stuck or failing. A role changes when the planner or `vllm-pd role` "
            "moved the worker.",
            (Query(_role_over_time(), "{{worker}}"),),
            kind=Kind.STATES,
            width=12,
            names=_ROLES,
        ),
        Panel(
            "Workers by role",
            "Those that are there, and those that the planner wants. Apart for minutes: moves are undone, or starts do "
            "not come up.",
            (
                *(Query(count_of_role(role), role) for role in ("prefill", "decode", "both")),
                Query(f"sum by (role) (vllm_pd_planner_wanted_workers{{{POOL}}})", "{{role}}, wanted"),
            ),
            width=6,
        ),
        Panel(
            "Moving and starting",
            "Workers that drain for another role, and those asked for that have not come up.",
            (
                Query(f"sum by (role) (vllm_pd_planner_moving_workers{{{POOL}}})", "to {{role}}"),
                Query(f"sum by (role) (vllm_pd_planner_starting_workers{{{POOL}}})", "starting {{role}}"),
            ),
            width=6,
        ),
        Panel(
            "Requests on each worker",
            "Computing and waiting, as the workers say. One far above the others: its answers are long, or it is slow.",
            (
                Query(f"sum by (worker) (vllm:num_requests_running{{{OF_WORKERS}}})", "{{worker}}"),
                Query(f"sum(vllm:num_requests_waiting{{{OF_WORKERS}}})", "all waiting"),
            ),
        ),
        of_each_worker(
            "KV cache in use",
            "Part of the blocks that requests hold. Near 100% requests wait or are preempted: more decode workers.",
            "vllm:kv_cache_usage_perc",
            "percentunit",
            high=1.0,
        ),
        Panel(
            "Free KV blocks",
            "Blocks that no request holds; what is cached in them can be dropped.",
            (
                Query(
                    f"max by (worker) (vllm_pd_router_worker_kv_blocks{{{WORKER}}}) * on (worker) "
                    f"(1 - max by (worker) (vllm:kv_cache_usage_perc{{{OF_WORKERS}}}))",
                    "{{worker}}",
                ),
            ),
        ),
        Panel(
            "Spread of the load",
            "Requests of a worker, computing and waiting: mean and standard deviation. A deviation above the mean: "
            "few workers get most.",
            (Query(_load("avg"), "mean"), Query(_load("stddev"), "deviation")),
        ),
        Panel(
            "In flight by worker, at the routers",
            "What routers sent and have not seen the end of. Much more than the worker says: the network, or a stuck "
            "server.",
            (Query(f"sum by (worker) (vllm_pd_router_inflight_requests{{{WORKER}}})", "{{worker}}"),),
        ),
        counted(
            "Preemptions",
            "Requests that lost their KV to others and are computed again: too many answers for the KV cache.",
            "worker",
            "vllm:num_preemptions_total",
            OF_WORKERS,
        ),
    ),
)

QUEUE = Row(
    "Prefill queue",
    (
        Panel(
            "Prompt tokens",
            "Waiting: nobody has taken them; own is the queue of single workers, shared that of all. Growing: more "
            "prefill workers are needed.",
            (
                Query(of_stores(f"{_QUEUE}_tokens", POOL, "pool", "stream", "state"), "{{state}}, {{stream}}"),
                Query(f"sum(vllm_pd_agent_prefill_claimed_tokens{{{OF_WORKERS}}})", "claimed, as workers say"),
            ),
        ),
        Panel(
            "Jobs",
            "Prompts in the queue.",
            (Query(of_stores(f"{_QUEUE}_requests", POOL, "pool", "stream", "state"), "{{state}}, {{stream}}"),),
        ),
        counted(
            "Prefill on another worker",
            "By way and end. direct although there is a store: see Sent directly.",
            "way, outcome",
            "vllm_pd_router_prefill_dispatch_total",
        ),
        Panel(
            "Not split",
            "Requests that one worker did whole, by why. split: those that two shared.",
            (
                Query(by("reason", "vllm_pd_router_bypass_total"), "{{reason}}"),
                Query(f"sum({rate('vllm_pd_router_split_total')})", "split"),
            ),
            "ops",
        ),
        troubled(
            "Sent directly",
            "Prompts that did not go through the queue, by why: the store is away or slow, workers that do not claim, "
            "...",
            "reason",
            "vllm_pd_router_prefill_direct_total",
        ),
        timed(
            "Prefill leg",
            "From handing a prompt over until it was computed, waiting included.",
            "vllm_pd_router_prefill_leg_seconds",
        ),
        counted(
            "Jobs claimed by each worker",
            "Prompts that prefill workers took out of the queue.",
            "worker",
            "vllm_pd_agent_prefill_claimed_total",
            OF_WORKERS,
        ),
        counted(
            "Ends of claimed jobs",
            "done is well. failed: the engine refused. returned: given back before they began, as when a worker "
            "changes its role. lost: cancelled, or taken by another.",
            "how",
            "vllm_pd_agent_prefill_ended_total",
            OF_WORKERS,
        ),
    ),
)

HANDOVER = Row(
    "Hand-over of KV (NIXL)",
    (
        counted(
            "Bytes",
            "KV that decode workers read from prefill workers.",
            "worker",
            f"{_BYTES}_sum",
            OF_WORKERS,
            unit="Bps",
        ),
        Panel(
            "Time of a hand-over",
            "Of one read. Rising with equal bytes: the network, or too many reads at once.",
            (
                Query(quantile(0.5, _TRANSFER, OF_WORKERS), "p50"),
                Query(quantile(0.95, _TRANSFER, OF_WORKERS), "p95"),
                Query(mean(_TRANSFER, OF_WORKERS), "mean"),
            ),
            "s",
        ),
        Panel(
            "Size of a hand-over",
            "Bytes of one read, in the mean: as long as the prompts, less what the reader had in its own caches.",
            (Query(mean(_BYTES, OF_WORKERS), "mean"),),
            "bytes",
        ),
        Panel(
            "Speed of a hand-over",
            "Bytes a second while it lasts.",
            (Query(f"sum({rate(f'{_BYTES}_sum', OF_WORKERS)}) / sum({rate(f'{_TRANSFER}_sum', OF_WORKERS)})", "mean"),),
            "Bps",
        ),
        summed(
            "Failed and expired",
            "failed: reads that broke off; the prompt is computed instead. expired: blocks whose lease ended before "
            "they were read.",
            {
                "failed": "vllm:nixl_num_failed_transfers_total",
                "expired": "vllm:nixl_num_kv_expired_reqs_total",
                "read too late": "vllm:nixl_num_notifications_after_expiry_total",
            },
            OF_WORKERS,
        ),
        troubled(
            "Hand-overs that nobody reads",
            "Released by the router because the request ended before; else their lease ends.",
            "outcome",
            "vllm_pd_router_released_handoffs_total",
        ),
        troubled(
            "Hand-overs given up",
            "Decode legs that ended before their first byte, by whether the decode worker was told.",
            "outcome",
            "vllm_pd_router_given_up_handoffs_total",
        ),
    ),
)

"""Rows on what decides: planner, role moves, the router itself."""

from __future__ import annotations

from deploy.grafana.model import Panel, Query, Row
from deploy.grafana.promql import OF_WORKERS, POOL, of_stores, quantile, rate
from deploy.grafana.shapes import counted, timed

_ACTIONS = "vllm_pd_planner_actions_total"
_OURS = 'job=~"router|planner"'
_MOVES = "vllm_pd_role_moves_total"

ACTIONS = Query(f'sum by (action, role) (increase({_ACTIONS}{{outcome="begun"}}[1m])) > 0', "{{action}} {{role}}")
"""Marks over all panels."""

PLANNER = Row(
    "Planner",
    (
        Panel(
            "Actions",
            "What the planner had done: moves, starts and removals, by the role they are about and what came of it. "
            "`vllm-pd planner explain` says why.",
            (
                Query(
                    f"sum by (action, role, outcome) (increase({_ACTIONS}{{{POOL}}}[5m]))",
                    "{{action}} {{role}}, {{outcome}}",
                ),
            ),
        ),
        Panel(
            "Moves of roles",
            "In five minutes, as the workers ended them. undone: what they had did not end in time, or the wish was "
            "taken back.",
            (Query(f"sum by (outcome) (increase({_MOVES}{{{OF_WORKERS}}}[5m]))", "{{outcome}}"),),
        ),
        Panel(
            "Duration of a move",
            "From the wish to the new role, over all moves of the last hour.",
            (
                Query(
                    f"sum(increase(vllm_pd_role_move_seconds_sum{{{OF_WORKERS}}}[1h])) / "
                    f"(sum(increase(vllm_pd_role_move_seconds_count{{{OF_WORKERS}}}[1h])) > 0) or vector(0)",
                    "mean",
                ),
            ),
            "s",
        ),
        Panel(
            "Attainment",
            "Part of the requests within the target for the first token (ttft) and between tokens (itl); dashed: the "
            "goal.",
            (
                Query(of_stores("vllm_pd_planner_attainment", POOL, "of"), "{{of}} attainment"),
                Query("max(vllm_pd_planner_attainment_target)", "goal", dashed=True),
            ),
            "percentunit",
            high=1.0,
        ),
        Panel(
            "Traffic as planned for",
            "What routers reported, and the planner plans with.",
            (Query(of_stores("vllm_pd_planner_observed_per_second", POOL, "what"), "{{what}}"),),
            "cps",
        ),
        Panel(
            "Numbers of the newest decision",
            "Loads, needs, forecasts, as `vllm-pd planner explain` names them.",
            (Query(of_stores("vllm_pd_planner_estimate", POOL, "name"), "{{name}}"),),
            low=None,
        ),
        counted(
            "Steps",
            "changes: something was decided. kept: nothing is better. blind: too little is known, so nothing is "
            "touched.",
            "verdict",
            "vllm_pd_planner_steps_total",
            POOL,
        ),
        Panel(
            "Who leads",
            "Exactly one planner decides about a pool; the others wait to take over.",
            (Query(f"vllm_pd_planner_leader{{{POOL}}}", "{{instance}}, {{pool}}"),),
            high=1.0,
        ),
        Panel(
            "Age of the newest step",
            "Far above the interval: the planner stands still.",
            (Query(f"vllm_pd_planner_step_age_seconds{{{POOL}}}", "{{instance}}, {{pool}}"),),
            "s",
        ),
    ),
)

ROUTER = Row(
    "The routers themselves",
    (
        timed(
            "Own time for a request",
            "From the whole body to the worker, prefill not counted. Above 10 ms: too many requests for one process.",
            "vllm_pd_router_proxy_overhead_seconds",
        ),
        counted(
            "Choice of the workers", "By why a worker was taken.", "policy, reason", "vllm_pd_router_decisions_total"
        ),
        Panel(
            "Foretold time to the first token",
            "Measured minus foretold: median and 95%. Far from 0: the rates learned do not fit.",
            (
                Query(quantile(0.5, "vllm_pd_router_ttft_prediction_error_seconds"), "p50"),
                Query(quantile(0.95, "vllm_pd_router_ttft_prediction_error_seconds"), "p95"),
            ),
            "s",
            low=None,
        ),
        Panel(
            "Processor",
            "Cores in use. A router is one process: near 1 it is full; start another one.",
            (Query(rate("process_cpu_seconds_total", _OURS), "{{job}} {{instance}}"),),
        ),
        Panel(
            "Memory",
            "Resident.",
            (Query(f"process_resident_memory_bytes{{{_OURS}}}", "{{job}} {{instance}}"),),
            "bytes",
        ),
        Panel(
            "Scraping",
            "1: Prometheus reaches it. A worker at 0 that has a role: its server hangs.",
            (Query("min by (job, instance) (up)", "{{job}} {{instance}}"),),
            high=1.0,
        ),
    ),
)

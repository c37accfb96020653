"""What has to happen for each alert to fire, as series a minute apart in promtool's notation."""

from __future__ import annotations

from dataclasses import dataclass

_ROUTER = 'up{job="router", instance="r"}'
_TTFT = "vllm_pd_router_ttft_seconds_bucket"
_ITL = "vllm:inter_token_latency_seconds_bucket"
_IN_ROUTER = 'vllm_pd_planner_info{job="router", instance="r", planner="x"}'
_JOBS = "vllm_pd_router_prefill_queue_requests"
_REQUESTS = "vllm_pd_router_requests_total"

BEGIN, END = 20, 45
"""Minute from which a case differs, and the last one."""
HEALTHY = {
    _ROUTER: "1x45",
    'up{job="workers", instance="w", worker="w"}': "1x45",
    'up{job="planner", instance="p"}': "1x45",
    'vllm_pd_router_workers{role="prefill"}': "1x45",
    'vllm_pd_router_workers{role="decode"}': "2x45",
    'vllm_pd_router_workers{role="both"}': "0x45",
    'vllm_pd_router_worker_usable{worker="w"}': "1x45",
    'vllm_pd_router_store_up{instance="r"}': "1x45",
    'vllm_pd_router_store_configured{instance="r"}': "1x45",
    f'{_REQUESTS}{{endpoint="/v1/completions", status="200"}}': "0+600x45",
    f'{_REQUESTS}{{endpoint="/v1/completions", status="500"}}': "0+1x45",
    f'{_REQUESTS}{{endpoint="/metrics", status="200"}}': "0+1200x45",
    "vllm_pd_router_split_total": "0+300x45",
    'vllm_pd_router_prefill_fallback_total{reason="timeout"}': "0+1x45",
    'vllm_pd_router_broken_streams_total{outcome="continued"}': "0+5x45",
    f'{_TTFT}{{le="0.5"}}': "0+600x45",
    f'{_TTFT}{{le="+Inf"}}': "0+600x45",
    f'{_ITL}{{le="0.05"}}': "0+600x45",
    f'{_ITL}{{le="+Inf"}}': "0+600x45",
    'vllm_pd_planner_target_seconds{of="ttft"}': "1x45",
    'vllm_pd_planner_target_seconds{of="itl"}': "0.1x45",
    'vllm:kv_cache_usage_perc{worker="w"}': "0.97x45",
    'vllm:num_requests_waiting{worker="w"}': "0x45",
    f'{_JOBS}{{pool="a", stream="shared", state="waiting"}}': "3x45",
    f'{_JOBS}{{pool="a", stream="shared", state="claimed"}}': "1x45",
    'vllm:nixl_num_failed_transfers_total{worker="w"}': "0+0.1x45",
    'vllm:nixl_num_kv_expired_reqs_total{worker="w"}': "0x45",
    'vllm_pd_ssd_off{worker="w", direction="load"}': "0x45",
    'vllm_pd_router_index_age_seconds{pool="a"}': "0.5x45",
    'vllm_pd_router_hash_mismatch{pool="a"}': "0x45",
    'vllm_pd_planner_leader{pool="a", instance="p"}': "1x45",
    'vllm_pd_planner_step_age_seconds{pool="a"}': "3x45",
    'vllm_pd_planner_steps_total{pool="a", verdict="blind"}': "0+1x45",
    'vllm_pd_planner_steps_total{pool="a", verdict="kept"}': "0+5x45",
    'vllm_pd_role_moves_total{outcome="done"}': "0+1x45",
    'vllm_pd_role_moves_total{outcome="undone"}': "0x45",
    'vllm_pd_planner_actions_total{pool="a", action="give_up", role="decode", outcome="begun"}': "0x45",
}


@dataclass(frozen=True, slots=True)
class Case:
    """What is different from a healthy cluster from the 20th minute on, and after how many minutes the alert fires."""

    series: dict[str, str]
    minutes: int


CASES = {
    "VllmPdRouterDown": Case({_ROUTER: "1x19 0x25"}, 2),
    "VllmPdNoDecodeWorker": Case({'vllm_pd_router_workers{role="decode"}': "2x19 0x25"}, 2),
    "VllmPdNoPrefillWorker": Case({'vllm_pd_router_workers{role="prefill"}': "1x19 0x25"}, 4),
    "VllmPdErrors": Case({f'{_REQUESTS}{{endpoint="/v1/completions", status="500"}}': "0x19 0+100x25"}, 6),
    "VllmPdStreamsBreak": Case({'vllm_pd_router_broken_streams_total{outcome="ended"}': "0x19 0+2x25"}, 5),
    "VllmPdTtftAboveTarget": Case({f'{_TTFT}{{le="0.5"}}': "0+600x19 11400x25", f'{_TTFT}{{le="4"}}': "0+600x45"}, 20),
    "VllmPdItlAboveTarget": Case({f'{_ITL}{{le="0.05"}}': "0+600x19 11400x25", f'{_ITL}{{le="1"}}': "0+600x45"}, 20),
    "VllmPdWorkerInTrouble": Case({'vllm_pd_router_worker_usable{worker="w"}': "1x19 0x25"}, 3),
    "VllmPdWorkerNotScraped": Case({'up{job="workers", instance="w", worker="w"}': "1x19 0x25"}, 4),
    "VllmPdKvCacheFull": Case({'vllm:num_requests_waiting{worker="w"}': "0x19 4x25"}, 7),
    "VllmPdPrefillQueueStuck": Case({f'{_JOBS}{{pool="a", stream="shared", state="claimed"}}': "1x19 0x25"}, 2),
    "VllmPdPrefillFails": Case({'vllm_pd_router_prefill_fallback_total{reason="timeout"}': "0x19 0+60x25"}, 10),
    "VllmPdTransfersFail": Case({'vllm:nixl_num_kv_expired_reqs_total{worker="w"}': "0x19 0+2x25"}, 5),
    "VllmPdSsdOff": Case({'vllm_pd_ssd_off{worker="w", direction="load"}': "0x19 1x25"}, 4),
    "VllmPdStoreDown": Case(
        {
            'vllm_pd_router_store_up{instance="r"}': "1x19 0x25",
            'vllm_pd_router_index_age_seconds{pool="a"}': "0x19 0+60x25",
        },
        3,
    ),
    "VllmPdIndexOld": Case({'vllm_pd_router_index_age_seconds{pool="a"}': "0.5x19 0+60x25"}, 5),
    "VllmPdHashMismatch": Case({'vllm_pd_router_hash_mismatch{pool="a"}': "0x19 1x25"}, 3),
    "VllmPdPlannerDown": Case({'up{job="planner", instance="p"}': "1x19 0x25"}, 4),
    "VllmPdNotPlanned": Case({'vllm_pd_planner_leader{pool="a", instance="p"}': "1x19 0x25"}, 4),
    "VllmPdTwoPlanners": Case({'vllm_pd_planner_leader{pool="a", instance="q"}': "0x19 1x25"}, 3),
    "VllmPdPlannerBlind": Case(
        {
            'vllm_pd_planner_steps_total{pool="a", verdict="kept"}': "0+5x19 95x25",
            'vllm_pd_planner_steps_total{pool="a", verdict="blind"}': "0x19 0+6x25",
        },
        22,
    ),
    "VllmPdRoleMovesUndone": Case({'vllm_pd_role_moves_total{outcome="undone"}': "0x19 0+1x25"}, 8),
    "VllmPdStartsGivenUp": Case(
        {'vllm_pd_planner_actions_total{pool="a", action="give_up", role="decode", outcome="begun"}': "0x19 1x25"}, 2
    ),
}

MORE = [
    # One that never came up, beside one that plans.
    ("VllmPdPlannerDown", Case({'up{job="planner", instance="q"}': "_x19 0x25"}, 4)),
    # One that was up, also where another one runs inside a router.
    (
        "VllmPdPlannerDown",
        Case({'up{job="planner", instance="p"}': "1x19 0x25", _IN_ROUTER: "1x45"}, 4),
    ),
    # A worker with many answers dies: the first that is heard of it is a counter that begins far above 0.
    ("VllmPdStreamsBreak", Case({'vllm_pd_router_broken_streams_total{outcome="ended"}': "_x20 40x24"}, 2)),
]
"""Further ways in which an alert is to fire."""

CALM = [
    # The planner runs inside the router, and the target of one by itself has never been there.
    {'up{job="planner", instance="p"}': "0x45", _IN_ROUTER: "1x45"},
    # Nobody plans, and no such target is configured.
    {'up{job="planner", instance="p"}': "_x45"},
]
"""Other healthy clusters: nothing fires."""

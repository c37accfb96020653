"""Rows on what clients get: overview, latency, errors."""

from __future__ import annotations

from deploy.grafana.model import Kind, Panel, Query, Row
from deploy.grafana.promql import (
    FAILED,
    FROM_CACHES,
    INFERENCE,
    OF_WORKERS,
    POOL,
    by,
    count_of_role,
    of_stores,
    quantile,
    rate,
    share,
    total,
)
from deploy.grafana.shapes import counted, timed, troubled

_REQUESTS = "vllm_pd_router_requests_total"
_REQUEST = "vllm_pd_router_request_seconds"
_TTFT = "vllm_pd_router_ttft_seconds"
_ITL = "vllm:inter_token_latency_seconds"
_SOURCES = "vllm:prompt_tokens_by_source_total"
_WAITING = of_stores("vllm_pd_router_prefill_queue_tokens", f'{POOL}, state="waiting"', "pool", "stream")


def _number(
    title: str,
    text: str,
    *queries: Query,
    unit: str = "short",
    steps: tuple[tuple[float, str], ...] = (),
    base: str = "blue",
    decimals: int | None = None,
) -> Panel:
    return Panel(title, text, queries, unit, Kind.NUMBER, width=3, steps=steps, base=base, decimals=decimals)


def _target(of: str) -> Query:
    return Query(f'max(vllm_pd_planner_target_seconds{{of="{of}"}})', "target", dashed=True)


OVERVIEW = Row(
    "Overview",
    (
        _number(
            "Requests",
            "Finished requests a second, over all routers.",
            Query(total(_REQUESTS, INFERENCE)),
            unit="reqps",
        ),
        _number(
            "Failed",
            "Part of the requests that ended with a status of 500 or more: see the row Errors. Clients that left "
            "(499) are not among them.",
            Query(share(rate(_REQUESTS, f"{INFERENCE}, {FAILED}"), rate(_REQUESTS, INFERENCE))),
            unit="percentunit",
            steps=((0.001, "yellow"), (0.02, "red")),
            base="green",
        ),
        _number(
            "TTFT p95",
            "95% of the answers begin within this time. Above the target: do prompts wait (row Prefill queue), or is "
            "too little in caches (row Caches)?",
            Query(quantile(0.95, _TTFT)),
            unit="s",
        ),
        _number(
            "ITL p95",
            "95% of the tokens come within this time after the one before. Above the target: too many answers for a "
            "decode worker, or prompts are computed between them.",
            Query(quantile(0.95, _ITL, POOL)),
            unit="s",
        ),
        _number("In flight", "Requests on the workers now.", Query("sum(vllm_pd_router_inflight_requests)")),
        _number(
            "Prompt tokens waiting",
            "Of prompts in the queue that no prefill worker has taken yet.",
            Query(f"sum({_WAITING})"),
        ),
        _number(
            "Answer tokens",
            "Generated a second.",
            Query(f"sum({rate('vllm:generation_tokens_total', POOL)})"),
            unit="cps",
        ),
        _number(
            "From caches",
            "Part of the prompt tokens that no worker had to compute, hand-overs not counted twice.",
            Query(share(rate(_SOURCES, f"{POOL}, {FROM_CACHES}"), rate(_SOURCES, POOL))),
            unit="percentunit",
            decimals=0,
        ),
        Panel(
            "Workers",
            "Known workers by role. A worker that is to do both does.",
            tuple(Query(count_of_role(role), role) for role in ("prefill", "decode", "both")),
            kind=Kind.NUMBER,
            width=6,
            base="blue",
        ),
        _number(
            "In trouble",
            "Workers that are left out because they are down, stuck, broken or too busy: the row Workers shows which.",
            Query("sum(max by (trouble) (vllm_pd_router_workers_in_trouble))"),
            steps=((1, "red"),),
            base="green",
        ),
        _number(
            "Store",
            "Whether every router reaches its store. While one does not, it serves from memory.",
            Query("min(vllm_pd_router_store_up)"),
            steps=((1, "green"),),
            base="red",
        ),
        _number(
            "TTFT attainment",
            "Part of the requests whose first token came in time, as the planner saw it in its newest step.",
            Query('min(vllm_pd_planner_attainment{of="ttft"})'),
            unit="percentunit",
            steps=((0.9, "yellow"), (0.95, "green")),
            base="red",
            decimals=1,
        ),
        _number(
            "ITL attainment",
            "Part of the requests whose tokens came in time, as the planner saw it in its newest step.",
            Query('min(vllm_pd_planner_attainment{of="itl"})'),
            unit="percentunit",
            steps=((0.9, "yellow"), (0.95, "green")),
            base="red",
            decimals=1,
        ),
        Panel(
            "Alerts",
            "What fires now. docs/operations.md has a section for each.",
            (
                Query(
                    'sum by (alertname, severity) (ALERTS{alertstate="firing", alertname=~"VllmPd.*"}) '
                    'or label_replace(vector(0), "alertname", "none", "", "")'
                ),
            ),
            kind=Kind.TABLE,
            width=6,
        ),
    ),
    height=4,
)

SERVICE = Row(
    "What clients get",
    (
        Panel(
            "Requests by status",
            "429 and 503 are back-pressure: there is too little of something. 499: the client left. 500, 502, 504: "
            "see the row Errors.",
            (Query(by("status", _REQUESTS, INFERENCE), "{{status}}"),),
            "reqps",
            stacked=True,
        ),
        timed(
            "Time to the first token",
            "From a request's head to the first byte of its answer, at the router; the dashed line is the planner's "
            "target.",
            _TTFT,
            beside=(_target("ttft"),),
        ),
        timed(
            "Time between tokens",
            "On the workers that answer; the dashed line is the planner's target.",
            _ITL,
            OF_WORKERS,
            beside=(_target("itl"),),
        ),
        Panel(
            "TTFT p95, split and whole",
            "Split: prefilled on one worker, answered by another. If split is slower by more than a hand-over, "
            "prompts wait for prefill workers.",
            (Query(quantile(0.95, _TTFT, per="mode"), "{{mode}}"),),
            "s",
        ),
        timed("Whole requests", "From a request's head to the end of its answer, at the router.", _REQUEST, INFERENCE),
        Panel(
            "Tokens",
            "Prompt tokens by where their KV came from (hand-overs count as external_kv_transfer on the decode "
            "worker), and answer tokens.",
            (
                Query(by("source", _SOURCES, OF_WORKERS), "prompt, {{source}}"),
                Query(f"sum({rate('vllm:generation_tokens_total', OF_WORKERS)})", "answer"),
            ),
            "cps",
        ),
    ),
)

ERRORS = Row(
    "Errors, retries, workers left out",
    (
        Panel(
            "Workers in trouble",
            "refused: takes no connections. down: no sign of life. stuck: answers, but its engine makes no step. "
            "failing: answered with errors. They get no work until they are well.",
            (Query("max by (trouble) (vllm_pd_router_workers_in_trouble)", "{{trouble}}"),),
        ),
        troubled(
            "Sent to another worker",
            "Before the first byte, by what the first worker did. Clients saw nothing of it.",
            "reason",
            "vllm_pd_router_decode_retry_total",
        ),
        troubled(
            "Streams that broke off",
            "continued: another worker went on where it stopped, and the client saw a pause. failed and ended: the "
            "client got an error.",
            "outcome",
            "vllm_pd_router_broken_streams_total",
        ),
        troubled(
            "Prefill that failed",
            "Prompts that were then computed where they are answered, by why. Many: prefill workers or the queue are "
            "ill.",
            "reason",
            "vllm_pd_router_prefill_fallback_total",
        ),
        troubled(
            "Requests taken from workers",
            "down: the worker gave no sign of life. stuck: it computed nothing. source_down: it reads from a worker "
            "that is down.",
            "reason",
            "vllm_pd_router_legs_ended_total",
        ),
        counted(
            "Refused", "With --require-prefill: there was nobody to prefill.", "reason", "vllm_pd_router_refused_total"
        ),
    ),
)

"""A simulated cluster serves every request, tells its router what a real one knows, and gives honest figures."""

from __future__ import annotations

import dataclasses

import pytest

from vllm_pd.routing.policies import POLICIES
from vllm_pd.sim.cluster import Cluster, ClusterConfig, Run
from vllm_pd.sim.floor import floor
from vllm_pd.sim.report import percentile, summarize, table
from vllm_pd.sim.timing import TimingModel
from vllm_pd.sim.trace import TraceRequest, made_key, make_trace
from vllm_pd.sim.work import EngineConfig

TRACE = make_trace(sessions=60, turns=5, rate=3.0, seed=1)


def simulate(trace: list[TraceRequest] = TRACE, **kwargs: object) -> Run:
    return Cluster(ClusterConfig(**kwargs)).simulate(trace)  # type: ignore[arg-type]


def request(at: float, blocks: int, first: int = 0, output: int = 1) -> TraceRequest:
    return TraceRequest(at, blocks * 512 + 1, output, tuple(made_key(first + i) for i in range(blocks)))


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_every_request(policy: str) -> None:
    run = simulate(policy=policy, workers=3)
    assert (len(run.served), run.unfinished, run.refused) == (len(TRACE), 0, 0)
    assert all(served.finished >= served.first_token > served.arrived for served in run.served)
    assert {served.worker for served in run.served} == {0, 1, 2}


def test_a_run_is_repeatable() -> None:
    assert simulate(workers=3, temperature=0.3, seed=5).served == simulate(workers=3, temperature=0.3, seed=5).served


def test_one_request_alone_takes_the_formula() -> None:
    (served,) = simulate([request(0.0, 4)], workers=2).served
    assert served.ttft == pytest.approx(TimingModel().whole_prefill(4 * 512 + 1))


def test_the_router_knows_a_cached_prefix_only_after_the_events_have_arrived() -> None:
    def workers(event_delay: float) -> list[int]:
        trace = [request(0.0, 8), request(1.0, 8), request(2.0, 8)]
        return [served.worker for served in simulate(trace, workers=4, event_delay=event_delay).served]

    known, unknown = workers(0.005), workers(60.0)
    assert len(set(known)) == 1
    assert len(set(unknown)) == 3


def test_faster_arrivals_wait_longer_and_end_sooner() -> None:
    slow, fast = (summarize(simulate(workers=2, speed=speed)) for speed in (1.0, 8.0))
    assert fast.ttft_mean > slow.ttft_mean and fast.makespan_s < slow.makespan_s


def test_routing_by_prefix_hits_more_than_taking_turns() -> None:
    knowing, turns = (summarize(simulate(policy=policy, workers=4)) for policy in ("predicted", "round-robin"))
    assert knowing.hits > 1.2 * turns.hits and knowing.ttft_mean < turns.ttft_mean


def test_lower_tiers_serve_what_the_gpu_has_evicted() -> None:
    engine = EngineConfig(gpu_blocks=40, cpu_blocks=80, ssd_blocks=2000)
    report = summarize(simulate(workers=2, engine=engine))
    assert report.hit_cpu > 0 and report.hit_ssd > 0 and report.unfinished == 0
    without = summarize(simulate(workers=2, engine=dataclasses.replace(engine, cpu_blocks=0, ssd_blocks=0)))
    assert report.hits > without.hits and without.hit_cpu == without.hit_ssd == 0


def test_split_requests_are_prefilled_and_decoded_by_different_workers() -> None:
    run = simulate(workers=0, prefill=2, decode=2)
    split = [served for served in run.served if served.prefiller >= 0]
    assert run.unfinished == 0 and split
    assert {served.prefiller for served in split} == {0, 1}
    assert {served.worker for served in run.served} == {2, 3}
    assert summarize(run).cluster == "2P+2D"


def test_a_split_request_waits_for_the_transfer() -> None:
    (served,) = simulate([request(0.0, 8)], workers=0, prefill=1, decode=1).served
    timing = TimingModel()
    tokens = 8 * 512 + 1
    least = timing.whole_prefill(tokens) + timing.transfer_base + (tokens - 1) * timing.transfer_token
    assert served.prefiller == 0 and served.worker == 1
    assert least < served.ttft < least + 0.01


def test_a_full_decode_worker_does_not_stop_the_prefill_workers_for_ever() -> None:
    engine = EngineConfig(gpu_blocks=24)
    run = simulate(
        [request(i * 0.01, 10, 100 * i, 200) for i in range(40)], workers=0, prefill=2, decode=1, engine=engine
    )
    assert (len(run.served), run.unfinished) == (40, 0)


def test_a_request_larger_than_any_cache_is_counted_as_refused() -> None:
    run = simulate([request(0.0, 4), request(0.1, 60)], engine=EngineConfig(gpu_blocks=16))
    report = summarize(run)
    assert (report.requests, report.refused, report.unfinished) == (1, 1, 0)


def test_overload_is_waited_out_and_shows() -> None:
    run = simulate(workers=1, speed=50.0)
    report = summarize(run)
    assert len(run.served) == len(TRACE) and report.makespan_s > 2 * TRACE[-1].at / 50
    assert report.utilization > 0.95


def test_nothing_is_below_the_floor_and_a_cluster_with_room_comes_close() -> None:
    config = ClusterConfig(workers=16, engine=EngineConfig(gpu_blocks=100_000))
    report = summarize(Cluster(config).simulate(TRACE))
    least = floor(TRACE, config.timing, config.engine)
    assert least.ttft_mean <= report.ttft_mean < 1.5 * least.ttft_mean
    assert least.ttft_p99 <= report.ttft_p99 and report.hits <= least.hits < 1.3 * report.hits


def test_a_report_adds_up() -> None:
    run = simulate(workers=3)
    report = summarize(run)
    assert report.ttft_curve[0] <= report.ttft_p50 <= report.ttft_p90 <= report.ttft_p99 <= report.ttft_curve[100]
    assert sum(run.gaps.values()) == sum(served.output - 1 for served in run.served)
    assert 1.0 <= report.share_max <= 3.0
    head, row = table([report])
    assert dict(zip(head, row, strict=True))["policy"] == "predicted"


def test_percentiles_are_by_nearest_rank() -> None:
    values = [float(i) for i in range(1, 11)]
    assert [percentile(values, q) for q in (0, 10, 50, 90, 99, 100)] == [1, 1, 5, 9, 10, 10]
    assert percentile([], 50) == 0

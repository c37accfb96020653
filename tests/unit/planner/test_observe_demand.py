"""From totals of routers to what happened between two looks."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_pd.planner.observe_demand import DemandWatch, latency, usual_rates
from vllm_pd.routing.speed import Rates
from vllm_pd.state.demand import BOUNDS_S, DemandReport, Spread

TARGETS = {"ttft_s": 0.5, "itl_s": 0.05}
T0 = 1_764_000_000_000


def spread(*seconds: float) -> Spread:
    counts = [0] * (len(BOUNDS_S) + 1)
    for each in seconds:
        counts[next((i for i, bound in enumerate(BOUNDS_S) if each <= bound), len(BOUNDS_S))] += 1
    return Spread(tuple(counts), sum(seconds))


def report(at_s: float, arrivals: int = 0, *, started_s: float = -1000.0, **totals: object) -> DemandReport:
    made = DemandReport(round(T0 + started_s * 1000), round(T0 + at_s * 1000), arrivals, finished=arrivals)
    return replace(made, **totals)  # type: ignore[arg-type]


def test_the_first_look_tells_nothing_and_the_next_what_was_between() -> None:
    watch = DemandWatch()
    assert watch.look({"r": report(0, 100)}, 50.0, **TARGETS) is None
    later = report(10, 130, prompt_tokens=9000, uncached_tokens=6000, output_tokens=600, finished_output_tokens=450)
    traffic = watch.look({"r": later}, 60.0, **TARGETS)
    assert traffic is not None
    assert (traffic.seconds, traffic.arrivals, traffic.finished) == (10.0, 30, 30)
    assert (traffic.prompt_tokens, traffic.uncached_tokens, traffic.output_tokens) == (9000, 6000, 600)
    assert traffic.mean_output == 15.0
    assert traffic.ttft is None
    assert traffic.age_s == 0.0


def test_routers_are_added_up_and_one_that_has_just_begun_counts_from_its_start() -> None:
    watch = DemandWatch()
    watch.look({"a": report(0, 10)}, 0.0, **TARGETS)
    new = report(9.5, 7, started_s=4.5)
    traffic = watch.look({"a": report(10, 20), "b": new}, 10.0, **TARGETS)
    assert traffic is not None
    assert traffic.arrivals == 17


def test_routers_that_are_restarted_one_after_the_other_are_no_rush() -> None:
    watch = DemandWatch()
    watch.look({"a": report(0, 10)}, 0.0, **TARGETS)
    new = {f"r{n}": report(10, 1, started_s=10.0 - n) for n in (1, 2, 3)}
    traffic = watch.look({"a": report(10, 20), **new}, 10.0, **TARGETS)
    assert traffic is not None
    assert (traffic.seconds, traffic.arrivals) == (10.0, 13)


def test_a_router_that_was_silent_for_a_look_is_counted_for_as_long_as_the_others() -> None:
    watch = DemandWatch()
    watch.look({"a": report(0, 0), "b": report(0, 0)}, 0.0, **TARGETS)
    assert watch.look({"a": report(0, 0), "b": report(10, 10)}, 10.0, **TARGETS) is None
    traffic = watch.look({"a": report(20, 20), "b": report(20, 20)}, 20.0, **TARGETS)
    assert traffic is not None
    assert (traffic.seconds, traffic.arrivals) == (10.0, 20)


def test_totals_that_began_anew_count_from_there() -> None:
    watch = DemandWatch()
    watch.look({"a": report(0, 1000)}, 0.0, **TARGETS)
    traffic = watch.look({"a": report(10, 7, started_s=4.0)}, 10.0, **TARGETS)
    assert traffic is not None
    assert traffic.arrivals == 7


def test_a_router_that_was_there_before_we_looked_counts_from_the_next_time() -> None:
    watch = DemandWatch()
    watch.look({"a": report(0, 10)}, 0.0, **TARGETS)
    traffic = watch.look({"a": report(10, 20), "old": report(10, 1_000_000)}, 10.0, **TARGETS)
    assert traffic is not None
    assert traffic.arrivals == 10
    traffic = watch.look({"a": report(20, 25), "old": report(20, 1_000_001)}, 20.0, **TARGETS)
    assert traffic is not None
    assert traffic.arrivals == 6


def test_silence_is_not_zero() -> None:
    watch = DemandWatch()
    watch.look({"a": report(0, 10)}, 0.0, **TARGETS)
    assert watch.look({"a": report(0, 10)}, 10.0, **TARGETS) is None
    assert watch.look({}, 20.0, **TARGETS) is None
    assert watch.look({"a": report(30, 40)}, 30.0, **TARGETS) is None
    quiet = watch.look({"a": report(40, 40)}, 40.0, **TARGETS)
    assert quiet is not None
    assert (quiet.arrivals, quiet.mean_output) == (0, None)


def test_a_lost_report_loses_nothing() -> None:
    watch = DemandWatch()
    watch.look({"a": report(0, 10)}, 0.0, **TARGETS)
    assert watch.look({"a": report(0, 10)}, 10.0, **TARGETS) is None
    traffic = watch.look({"a": report(20, 40)}, 20.0, **TARGETS)
    assert traffic is not None
    assert (traffic.seconds, traffic.arrivals) == (20.0, 30)


def test_while_one_of_two_routers_is_silent_what_arrives_is_not_known() -> None:
    watch = DemandWatch()
    watch.look({"a": report(0), "b": report(0)}, 0.0, **TARGETS)
    watch.look({"a": report(10, 10), "b": report(10, 10)}, 10.0, **TARGETS)
    assert watch.look({"a": report(20, 20), "b": report(10, 10)}, 20.0, **TARGETS) is None
    # It is gone: the other one has all there is.
    traffic = watch.look({"a": report(30, 40)}, 30.0, **TARGETS)
    assert traffic is not None
    assert (traffic.seconds, traffic.arrivals) == (10.0, 20)


def test_a_report_that_is_a_moment_late_goes_on_as_before() -> None:
    watch = DemandWatch()
    watch.look({"a": report(0), "b": report(0)}, 0.0, **TARGETS)
    watch.look({"a": report(1, 10), "b": report(1, 30)}, 1.0, **TARGETS)
    traffic = watch.look({"a": report(2, 20), "b": report(1, 30)}, 2.0, **TARGETS)
    assert traffic is not None
    assert (traffic.seconds, traffic.arrivals, traffic.age_s) == (1.0, 40, 1.0)
    traffic = watch.look({"a": report(3, 30), "b": report(3, 90)}, 3.0, **TARGETS)
    assert traffic is not None
    assert (traffic.seconds, traffic.arrivals) == (1.0, 40)


def test_a_routers_clock_that_went_back_costs_one_look() -> None:
    watch = DemandWatch()
    watch.look({"a": report(0, 10)}, 0.0, **TARGETS)
    assert watch.look({"a": report(-500, 20)}, 10.0, **TARGETS) is None
    traffic = watch.look({"a": report(-490, 25)}, 20.0, **TARGETS)
    assert traffic is not None
    assert (traffic.seconds, traffic.arrivals) == (10.0, 5)


def test_quantiles_and_targets_come_out_of_the_histogram() -> None:
    found = latency([(spread(0.3, 0.3), spread(0.3, 0.3, *[0.1] * 90, *[2.0] * 10))], 0.5)
    assert found is not None
    assert found.count == 100
    assert found.mean_s == pytest.approx(0.29)
    assert found.p50_s == pytest.approx(0.1, rel=0.35)
    assert found.p95_s == pytest.approx(2.0, rel=0.35)
    assert found.within == pytest.approx(0.9)
    assert latency([(spread(0.3), spread(0.3))], 0.5) is None


@given(
    st.lists(st.floats(0, 1000), max_size=30),
    st.lists(st.floats(0, 1000), max_size=30),
    st.floats(1e-4, 1000),
)
def test_no_histogram_gives_a_figure_that_is_none(before: list[float], after: list[float], target: float) -> None:
    found = latency([(spread(*before), spread(*before, *after))], target)
    assert (found is None) == (not after)
    if found is not None:
        assert found.count == len(after)
        assert 0 <= found.within <= 1
        assert 0 <= found.p50_s <= found.p95_s
        assert all(math.isfinite(each) for each in (found.mean_s, found.p50_s, found.p95_s))


def test_rates_are_those_of_the_router_that_has_served_most() -> None:
    slow, fast = Rates(step_base=1.0), Rates(step_base=0.1)
    reports = {"a": report(0, 5, rates=slow), "b": report(0, 50, rates=fast), "c": report(0, 500)}
    assert usual_rates(reports) is fast
    assert usual_rates({"c": report(0, 500)}) is None
    assert usual_rates({}) is None


@pytest.mark.parametrize(("seconds", "within"), [(0.047, 1.0), (0.053, 0.0)])
def test_what_just_meets_a_target_is_told_from_what_just_misses_it(seconds: float, within: float) -> None:
    watch = DemandWatch()
    watch.look({"r": report(0)}, 0.0, **TARGETS)
    traffic = watch.look({"r": report(10, answer_itl=spread(*[seconds] * 20))}, 10.0, **TARGETS)
    assert traffic is not None and traffic.answer_itl is not None
    assert (traffic.answer_itl.count, traffic.answer_itl.within) == (20, within)
    assert traffic.itl is None

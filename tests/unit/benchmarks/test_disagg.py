"""The workloads of `benchmarks.disagg`, and how its targets are judged."""

from __future__ import annotations

import json

import pytest

from benchmarks import disagg
from benchmarks.common import Report
from benchmarks.disagg_workloads import BLOCK, WORKLOADS, Flow, Workload


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda each: each.name)
def test_arrivals_are_ordered_repeatable_and_unlike_each_other(workload: Workload) -> None:
    made = workload.requests(10.0)
    assert made == workload.requests(10.0) and made
    assert [each.at for each in made] == sorted(each.at for each in made) and made[-1].at < 10.0
    assert all(len(each.keys) == each.prompt // BLOCK for each in made)
    if workload.flows:
        keys = [key for each in made for key in each.keys]
        assert len(set(keys)) == len(keys)


def test_a_workload_has_a_row_for_each_rule() -> None:
    report = Report("x")
    disagg.simulate(Workload("w", 1, 1, (Flow(3, 2000, 20),)), ("always", "never", "auto", "both"), 10.0, report)
    assert [row["rule"] for row in report.results] == ["always", "never", "auto", "both"]
    assert [row["workers"] for row in report.results] == ["1P+1D"] * 3 + ["2"]
    assert [row["split"] for row in report.results[:2]] == [1.0, 0.0]
    json.dumps(report.results)


def test_the_worst_workload_is_judged_against_the_better_rival_and_what_was_given_up_is_said() -> None:
    def cell(workload: str, rule: str, request: float, rate: float, ttft: float) -> dict[str, object]:
        return {
            "workload": workload,
            "rule": rule,
            "request_ms": request,
            "tokens_per_s": rate,
            "ttft_ms": ttft,
            "itl_p99_ms": 5.0,
        }

    report = Report("x")
    rows = [
        cell("a", "always", 100.0, 50.0, 20.0),
        cell("a", "never", 200.0, 40.0, 10.0),
        cell("a", "auto", 104.0, 50.0, 15.0),
        cell("b", "always", 300.0, 10.0, 9.0),
        cell("b", "never", 200.0, 20.0, 9.0),
        cell("b", "auto", 150.0, 19.6, 9.0),
    ]
    disagg.judge("simulator", rows, report)
    longer, slower = report.targets
    assert (longer.value, longer.ok, "(a)" in longer.name) == (1.04, False, True)
    assert (slower.value, slower.ok, "(b)" in slower.name) == (0.98, True, True)
    assert report.notes == [
        "simulator: TTFT by itself is within 3% of the better rival's in 1 of 2; not in a 1.50",
        "simulator: ITL by itself is within 3% of the better rival's in 2 of 2",
    ]

from __future__ import annotations

import json
import os
import random

import pytest

from benchmarks.common import Report, Target, cpu_seconds, median_interval, percentile, table


@pytest.mark.parametrize(("percent", "value"), [(0, 1), (1, 1), (50, 50), (99, 99), (99.5, 100), (100, 100)])
def test_percentiles_are_values_that_occurred(percent: float, value: int) -> None:
    assert percentile(list(range(100, 0, -1)), percent) == value


def test_target_without_a_value_is_not_reached() -> None:
    assert Target.at_most("x", 2.0, 2.0).ok
    assert not Target.at_most("x", 2.1, 2.0).ok
    assert not Target.at_most("x", None, 2.0).ok


def test_json_report_is_one_object_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("b", [{"a": 1}], [Target.at_most("t", 1.0, 2.0)])
    report.show(as_json=True)
    value = json.loads(capsys.readouterr().out)
    assert value["name"] == "b"
    assert value["results"] == [{"a": 1}]
    assert value["targets"] == [{"name": "t", "value": 1.0, "target": 2.0, "ok": True}]
    assert value["machine"]["cores"] >= 1


def test_table_shows_missing_values_and_aligns_numbers() -> None:
    assert table([{"name": "a", "us": 1.0}, {"name": "bb", "us": None}]) == ("name  us\n----  --\na      1\nbb     -")
    assert table([]) == "(nothing)"


def test_cpu_time_of_a_process_grows_with_its_work() -> None:
    before = cpu_seconds(os.getpid())
    while cpu_seconds(os.getpid()) - before < 0.02:
        sum(range(10_000))
    with pytest.raises(OSError):
        cpu_seconds(2**22 + 1)


def test_a_target_may_be_a_least_value() -> None:
    assert Target.at_least("x", 2.0, 2.0).ok
    assert not Target.at_least("x", 1.9, 2.0).ok
    assert not Target.at_least("x", None, 2.0).ok


def test_rows_of_another_kind_are_another_table(capsys: pytest.CaptureFixture[str]) -> None:
    Report("b", [{"a": 1}, {"a": 2}, {"other": 3}]).show(as_json=False)
    assert capsys.readouterr().out.endswith("a\n-\n1\n2\n\nother\n-----\n    3\n")


@pytest.mark.parametrize("count", [1, 6, 25])
def test_an_interval_holds_the_median_in_nineteen_of_twenty_cases(count: int) -> None:
    rng = random.Random(5)
    held = 0
    for _ in range(400):
        low, high = median_interval([rng.gauss(1, 0.1) for _ in range(count)])
        held += low <= 1 <= high
    assert held >= 370 if count > 1 else held == 0

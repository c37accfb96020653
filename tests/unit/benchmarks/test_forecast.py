"""How forecasts are judged, without any library."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import forecast
from benchmarks.forecast import BIN_S, Method, judged, main, series
from benchmarks.planner_workloads import STEP


def test_a_series_has_the_requests_of_each_bin() -> None:
    short = replace(STEP, seconds=100.0)
    values = series(short, Path())
    assert len(values) in (8, 9)
    assert sum(values) * BIN_S == pytest.approx(len(short.requests(Path())), abs=30)


def test_a_guess_is_compared_with_what_came_so_much_later_and_sees_nothing_of_it() -> None:
    values = [float(n) for n in range(200)]
    seen: list[int] = []

    def last(given: object) -> list[float]:
        assert isinstance(given, list)
        seen.append(len(given))
        return [given[-1]] * 3

    row = judged("growing", values, Method("last", last, window=10_000), every=10)
    assert seen[1:4] == [30, 40, 50]
    mean = sum(values) / len(values)
    # The mean of four bins from the first on lies one and a half bins behind it.
    for seconds, steps in ((10, 1), (60, 6), (300, 30)):
        assert row[f"error_{seconds}_s"] == pytest.approx((steps + 1.5) / mean, abs=0.001)


def test_libraries_that_are_missing_are_told_and_the_others_judged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    methods = (forecast.METHODS[0], Method("far", lambda values: values[:3], "no_such_library"))
    monkeypatch.setattr(forecast, "METHODS", methods)
    assert main(["--series", "spike", "--every", "20", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["method"] for row in told["results"]] == ["mean of the last minute"]
    assert told["notes"] == ["far: no_such_library is not installed"]
    assert main(["--series", "tides"]) == 2

"""What the planner of a comparison is told before it comes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.planner import Cell
from benchmarks.planner_foresight import _seen, knowing
from benchmarks.planner_workloads import STEP
from vllm_pd.planner.memory import Memory
from vllm_pd.planner.model import AddAction, Mode

SHORT = replace(STEP, seconds=1800.0)
"""From answers to prompts at 1,200 s."""
FIXED = Cell(SHORT, "enough", mode=Mode.FIXED).config()


def test_it_is_what_came_where_there_were_enough_workers() -> None:
    foresee = _seen(FIXED, SHORT.requests(Path()))
    before, after = (foresee((300.0,), Memory(), at)[0].demand for at in (600.0, 1100.0))
    assert before.arrivals == pytest.approx(1.95, rel=0.25) and after.arrivals == pytest.approx(2.0, rel=0.25)
    assert before.prompt_tokens < 10_000 < 15_000 < after.prompt_tokens
    assert foresee((300.0,), Memory(), 9_000.0)[0].demand.arrivals == 0.0


def test_who_knows_starts_workers_before_they_are_needed() -> None:
    trace = SHORT.requests(Path())
    config = Cell(SHORT, "knows", mode=Mode.SCALE, cold_start=120.0).config()
    plans = knowing(config, FIXED, trace).simulate_planned(trace).plans
    begins = [plan.at_s for plan in plans if any(isinstance(action, AddAction) for action in plan.actions)]
    assert any(1000.0 <= at < 1200.0 for at in begins)

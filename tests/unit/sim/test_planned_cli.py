"""`vllm-pd simulate --planner` on the command line."""

from __future__ import annotations

import json

import pytest

from vllm_pd.cli import main

SMALL = ("simulate", "--made-up", "30", "--jobs", "1", "--policies", "predicted", "--prefill", "2", "--decode", "2")


def test_the_cluster_as_it_is_stands_beside_the_planner_for_every_cold_start(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*SMALL, "--planner", "scale", "--cold-start", "10,60", "--quiet", "--json"]) == 0
    cells = json.loads(capsys.readouterr().out)
    seen = [(cell["planner"], cell["cold_start_s"]) for cell in cells]
    assert seen == [("static", 10.0), ("sla scale", 10.0), ("sla scale", 60.0)]
    assert all(cell["cluster"] == "2P+2D" and cell["ended"] == cell["arrivals"] == 180 for cell in cells)
    assert cells[0]["moves"] == 0 and cells[0]["workers_mean"] == 4.0


def test_the_table_explains_itself_and_steps_that_act_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--planner", "scale", "--planner-rule", "dynamo-load", "--ttft-ms", "1000", "--explain")
    assert main([*SMALL, *flags]) == 0
    shown = capsys.readouterr()
    assert "met both" in shown.out and "first token within 1000 ms" in shown.out
    assert "2/2 dynamo-load scale, 2P+2D workers" in shown.err and " s: " in shown.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--planner", "fixed", "--html", "page.html"), "leave out --plot and --html"),
        (("--planner", "fixed", "--ttft-ms", "0"), "ttft_s"),
        (("--planner", "scale", "--start-fails", "2"), "start_fails"),
        (("--planner", "scale", "--min-workers", "8", "--max-workers", "4"), "8 to 4 workers"),
    ],
)
def test_wrong_settings_end_with_2_and_a_sentence(
    flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, *flags]) == 2
    assert message in capsys.readouterr().err

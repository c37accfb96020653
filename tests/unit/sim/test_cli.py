"""`vllm-pd simulate` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_pd.cli import main

SMALL = ("simulate", "--made-up", "12", "--jobs", "1", "--quiet")


def test_cells_are_every_policy_on_every_cluster_at_every_speed(capsys: pytest.CaptureFixture[str]) -> None:
    flags = (
        "--policies",
        "predicted,round-robin",
        "--workers",
        "2,3",
        "--speed",
        "1,2",
        "--prefill",
        "1",
        "--decode",
        "1",
    )
    assert main([*SMALL, *flags, "--json"]) == 0
    cells = json.loads(capsys.readouterr().out)
    seen = [(cell["cluster"], cell["speed"], cell["policy"]) for cell in cells]
    assert seen == [(c, s, p) for c in ("2", "3", "1P+1D") for s in (1, 2) for p in ("predicted", "round-robin")]
    assert all(cell["requests"] == 72 and cell["unfinished"] == 0 for cell in cells)


def test_every_rule_of_splitting_is_a_cell_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--policies", "predicted", "--workers", "2", "--prefill", "1", "--decode", "1", "--disagg")
    assert main([*SMALL, *flags, "all", "--max-local-prefill-tokens", "600", "--html", str(tmp_path / "p.html")]) == 0
    names = [line.split()[2] for line in capsys.readouterr().out.splitlines()[1:8]]
    assert names == ["-", "auto", "always", "never", "threshold", "dynamo-old", "dynamo-new"]
    assert "predicted, never" in (tmp_path / "p.html").read_text()
    assert main([*SMALL, *flags, "never,always", "--json"]) == 0
    _, never, always = json.loads(capsys.readouterr().out)
    assert never["split"] == 0 < always["split"] and never["request_mean"] > never["ttft_mean"]


def test_several_processes_give_the_same_figures(capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for jobs in ("1", "2"):
        assert main(["simulate", "--made-up", "12", "--jobs", jobs, "--json"]) == 0
        shown = capsys.readouterr()
        found.append(json.loads(shown.out))
        assert "4/4" in shown.err
    assert found[0] == found[1]


def test_the_table_names_each_policy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--policies", "all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("policy") and len(lines) == 11
    assert "holds all earlier prompts: TTFT mean" in lines[-1]


def test_plots_are_written_and_the_page_needs_nothing_else(tmp_path: Path) -> None:
    picture, page = tmp_path / "p.png", tmp_path / "p.html"
    assert main([*SMALL, "--plot", str(picture), "--html", str(page)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    assert "<svg" in text and 'class="best"' in text
    assert "http" not in text.split("<svg")[0] and "src=" not in text


def test_a_fitted_timing_is_used_and_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples, timing = tmp_path / "s.jsonl", tmp_path / "t.json"
    rows = [{"uncached": n, "seconds": 1.0 + n / 1000} for n in (10, 500, 1000, 4000)]
    samples.write_text("\n".join(map(json.dumps, rows)))
    assert main([*SMALL, "--fit", str(samples), "--save-timing", str(timing), "--json", "--policies", "predicted"]) == 0
    fitted = json.loads(capsys.readouterr().out)
    assert json.loads(timing.read_text())["prefill_base"] == pytest.approx(1.0, rel=0.05)
    assert main([*SMALL, "--timing", str(timing), "--json", "--policies", "predicted"]) == 0
    assert json.loads(capsys.readouterr().out) == fitted


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "either a trace or --made-up"),
        (("no-such-file",), "cannot be read"),
        (("--made-up", "3", "--policies", "best"), "no policy 'best'"),
        (("--made-up", "3", "--prefill", "2"), "go together"),
        (("--made-up", "3", "--disagg", "somtimes"), "no rule 'somtimes'"),
        (("--made-up", "3", "--timing", "no-such-file"), "timing file"),
    ],
)
def test_wrong_settings_end_with_2_and_a_sentence(
    flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *flags]) == 2
    assert message in capsys.readouterr().err

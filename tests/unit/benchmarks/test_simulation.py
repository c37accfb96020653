"""The simulation benchmark on small traces of its format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.simulation import main


def test_without_traces_it_says_where_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--traces", str(tmp_path)]) == 2
    assert "Mooncake" in capsys.readouterr().err


def test_every_cell_has_its_targets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("conversation", "synthetic"):
        lines = [
            json.dumps(
                {"timestamp": 50 * i, "input_length": 3000, "output_length": 9, "hash_ids": [i % 3, *range(9, 14)]}
            )
            for i in range(40)
        ]
        (tmp_path / f"{name}_trace.jsonl").write_text("\n".join(lines))
    main(["--traces", str(tmp_path), "--json", "--jobs", "1"])
    shown = json.loads(capsys.readouterr().out)
    assert {(row["trace"], row["workers"], row["speed"]) for row in shown["results"]} == {
        (trace, workers, speed)
        for trace in ("conversation", "synthetic")
        for workers in ("4", "16")
        for speed in ("x1", "x2")
    }
    assert len(shown["targets"]) == 8 * 3 + 1 and len(shown["notes"]) == 2
    assert all(row["unfinished"] == 0 for row in shown["results"])

"""The parts of the offload benchmark that need neither a server nor a disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import offload_copy, offload_hits
from vllm_pd.kv_offload.policies import POLICIES

KIB = 1 << 10


@pytest.mark.vllm
def test_copies_are_measured_both_ways_in_blocks_of_the_given_size() -> None:
    speeds = offload_copy.measure(64 * KIB, 1 << 20, turns=1)
    assert min(speeds.memcpy, speeds.memcpy_many, speeds.store, speeds.load) > 0
    assert speeds.threads >= 1 and 0 < speeds.submit < 10


def test_without_traces_it_says_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(offload_hits.FOLDER_VARIABLE, str(tmp_path))
    results, targets = offload_hits.run(quick=True)
    assert results == [] and [target.ok for target in targets] == [False, False]
    assert "Mooncake" in capsys.readouterr().err


def test_every_policy_is_in_every_cell_and_ours_is_held_against_vllms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("conversation", "synthetic"):
        lines = [
            json.dumps({"timestamp": i, "input_length": 3000, "output_length": 9, "hash_ids": [i % 3, *range(9, 14)]})
            for i in range(40)
        ]
        (tmp_path / f"{name}_trace.jsonl").write_text("\n".join(lines))
    monkeypatch.setenv(offload_hits.FOLDER_VARIABLE, str(tmp_path))
    results, targets = offload_hits.run(quick=True)
    cells = len(offload_hits.CPU_BLOCKS[1::2])
    assert len(results) == len(targets) == 2 * cells and all(target.ok for target in targets)
    assert {*POLICIES, "optimum", "gpu_alone"} <= set(results[0])
    assert all(row[name] <= row["optimum"] for row in results for name in POLICIES)

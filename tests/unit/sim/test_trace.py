"""Traces are read as Mooncake writes them, and faults are named by line."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from vllm_pd.block_hash import KEY_BYTES
from vllm_pd.errors import SettingsError
from vllm_pd.sim.trace import make_trace, read_trace


def line(at: float = 0, prompt: int = 1000, output: int = 5, ids: Any = (1, 2)) -> dict[str, Any]:
    return {"timestamp": at, "input_length": prompt, "output_length": output, "hash_ids": ids}


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((text if isinstance(text, str) else json.dumps(text)) + "\n" for text in lines))
    return path


def test_whole_blocks_have_keys_and_times_count_from_the_first_request(tmp_path: Path) -> None:
    path = write(tmp_path / "t", line(at=5000, prompt=1300, ids=[7, 8, 9]), line(at=6500, prompt=1024, ids=[7, 8]))
    first, second = read_trace(path)
    assert (first.at, second.at) == (0, 1.5)
    assert len(first.keys) == 2 and second.keys == first.keys
    assert {len(key) for key in first.keys} == {KEY_BYTES}


def test_the_same_id_behind_another_beginning_is_another_block(tmp_path: Path) -> None:
    path = write(tmp_path / "t", line(prompt=1024, ids=[1, 2]), line(prompt=1024, ids=[3, 2]))
    first, second = read_trace(path)
    assert not set(first.keys) & set(second.keys)


def test_hash_ids_are_divided_into_smaller_blocks(tmp_path: Path) -> None:
    path = write(tmp_path / "t", line(prompt=1000, ids=[1, 2]), line(prompt=700, ids=[1, 5]))
    first, second = read_trace(path, block_size=128)
    assert (len(first.keys), len(second.keys)) == (7, 5)
    assert first.keys[:4] == second.keys[:4] and first.keys[4] != second.keys[4]


def test_a_limit_reads_only_the_beginning(tmp_path: Path) -> None:
    path = write(tmp_path / "t", line(), line(), "not read")
    assert len(read_trace(path, limit=2)) == 2


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{", "line 2: not a JSON object"),
        ("[1]", "line 2: not a JSON object"),
        (line(prompt=0), "line 2: input_length"),
        (line(at=-1), "line 2: timestamp"),
        (line(output="many"), "line 2: output_length"),
        (line(ids=["a", "b"]), "line 2: hash_ids must be a list"),
        (line(prompt=2000, ids=[1, 2]), "line 2: 2 hash_ids cannot cover 2000 tokens"),
        (line(at=5), "line 2: the timestamp is smaller"),
    ],
)
def test_a_wrong_line_is_named_with_its_fault(tmp_path: Path, bad: Any, message: str) -> None:
    path = write(tmp_path / "t", line(at=10), bad)
    with pytest.raises(SettingsError, match=message):
        read_trace(path)


def test_an_absent_trace_says_where_public_ones_are(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"cannot be read.*Mooncake"):
        read_trace(tmp_path / "none")


def test_made_up_turns_continue_each_other_and_share_system_prompts() -> None:
    trace = make_trace(sessions=30, turns=4, system_prompts=2, seed=3)
    assert trace == make_trace(sessions=30, turns=4, system_prompts=2, seed=3)
    assert len(trace) == 120
    assert all(a.at <= b.at for a, b in itertools.pairwise(trace))
    assert all(len(request.keys) == request.prompt // 512 for request in trace)
    assert len({request.keys[0] for request in trace}) == 2
    assert len({request.keys for request in trace}) > 60

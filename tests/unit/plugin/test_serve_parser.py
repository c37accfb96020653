"""What vLLM's own parser says of the arguments of a graph's workers."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("vllm")

from vllm_pd.graph.serve_parser import problems


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ("--max-modle-len 8192", r"hold what is no option: --max-modle-len \(did you mean \'--max-model-len\'\?\)"),
        ("--enforce_eagr --dtype auto", r"--enforce-eagr \(did you mean \'--enforce-eager\'\?\)"),
        ("--gpu-memory-utilisation=0.5", "--gpu-memory-utilisation=0.5 .did you mean '--gpu-memory-utilization'"),
        ("--max-model-len many", "are refused: argument --max-model-len: invalid"),
        ("--dtype floot16", "are refused: argument --dtype: invalid choice"),
        ("--tensor-parallel-size", "expected one argument"),
        ("--compilation-config {", "are refused: argument --compilation-config"),
    ],
)
def test_what_it_does_not_take_is_told_with_the_nearest_option(args: str, problem: str) -> None:
    (found,) = problems({"decode": ["m", *args.split()]}).items()
    assert found[0] == "decode"
    assert re.search(problem, found[1])


def test_what_it_takes_is_no_problem() -> None:
    args = (
        "--kv-connector pd --role decode --pd-store redis://h:1 --max_model_len 16k --compilation-config.mode 3 -tp 2"
    )
    assert problems({"decode": ["m", *args.split()], "prefill": ["m", "--enforce-eager"]}) == {}

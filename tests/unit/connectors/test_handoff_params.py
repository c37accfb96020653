"""Which hand-off parameters vLLM may be given to read by."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_pd.connectors.handoff_params import Wanted, problem

GOOD: dict[str, Any] = {
    "do_remote_prefill": True,
    "remote_engine_id": "engine",
    "remote_request_id": "request",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "remote_block_ids": [[1, 2, 3, 4]],
    "remote_num_tokens": 100,
}
WANTED = Wanted(tokens=100, groups=1, block_size=32)


def test_what_a_prefill_worker_writes_is_usable() -> None:
    assert problem(GOOD, WANTED) is None
    assert problem({**GOOD, "dcp_size": 2, "pp_size": 1, "remote_block_ids": ([1, 2],)}, WANTED) is None
    assert problem({name: value for name, value in GOOD.items() if name != "remote_num_tokens"}, WANTED) is None


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"remote_engine_id": None}, "remote_engine_id"),
        ({"remote_request_id": 7}, "remote_request_id"),
        ({"remote_host": ""}, "remote_host"),
        ({"remote_port": 0}, "remote_port"),
        ({"remote_port": 65536}, "remote_port"),
        ({"remote_port": "5600"}, "remote_port"),
        ({"tp_size": 0}, "tp_size"),
        ({"tp_size": True}, "tp_size"),
        ({"pp_size": None}, "pp_size"),
        ({"remote_block_ids": None}, "remote_block_ids"),
        ({"remote_block_ids": "none"}, "remote_block_ids"),
        ({"remote_block_ids": [1, 2]}, "remote_block_ids"),
        ({"remote_block_ids": [[1, -2]]}, "remote_block_ids"),
        ({"remote_block_ids": []}, "blocks of 0 KV cache groups"),
        ({"remote_block_ids": [[1], [2]]}, "blocks of 2 KV cache groups"),
        ({"remote_block_ids": [[1, 2, 3]]}, "too few blocks"),
        ({"remote_num_tokens": 101}, "same chat template"),
    ],
)
def test_anything_else_is_not(changes: dict[str, Any], cause: str) -> None:
    assert cause in (problem({**GOOD, **changes}, WANTED) or "")


def test_groups_that_hold_a_part_of_the_prompt_may_have_fewer_blocks() -> None:
    hybrid = Wanted(tokens=100, groups=2, block_size=0)
    assert problem({**GOOD, "remote_block_ids": [[1, 2, 3, 4], [5]]}, hybrid) is None


def test_a_prompt_without_token_ids_is_taken_at_its_word() -> None:
    assert problem({**GOOD, "remote_num_tokens": 7}, Wanted(None, 1, 32)) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)


@given(st.sampled_from(sorted(GOOD)), JSON)
def test_no_value_makes_it_raise(name: str, value: Any) -> None:
    problem({**GOOD, name: value}, WANTED)

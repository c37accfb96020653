"""What goes over the wire when a hand-off is given up; whatever else stands there is nothing."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from vllm_pd.given_up import GIVE_UP_FIELD, MAX_HANDOFFS, NOTHING, GivenUp, give_up_params, given_up, handoff_in

PARAMS = {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2]], "remote_engine_id": "p",
    "remote_request_id": "cmpl-1", "remote_host": "10.0.0.1", "remote_port": 5600, "tp_size": 2, "dcp_size": 1,
    "pp_size": 1, "remote_num_tokens": 60, "pd_lease_until_ms": 1_700_000_000_000,
}  # fmt: skip


def test_a_hand_off_is_named_without_its_blocks() -> None:
    handoff = handoff_in(msgspec.json.encode(PARAMS))
    assert handoff is not None
    sent = msgspec.json.decode(msgspec.json.encode(give_up_params("d", [handoff])))
    assert "remote_block_ids" not in sent[GIVE_UP_FIELD]["handoffs"][0]
    assert given_up(sent) == GivenUp("d", [handoff])


@pytest.mark.parametrize(
    "field", ["remote_engine_id", "remote_request_id", "remote_host", "remote_port", "pd_lease_until_ms"]
)
@pytest.mark.parametrize("value", [None, "", -1, [1]])
def test_transfer_parameters_that_do_not_name_it_fully_are_none(field: str, value: Any) -> None:
    assert handoff_in(msgspec.json.encode({**PARAMS, field: value})) is None
    rest = {name: each for name, each in PARAMS.items() if name != field}
    assert handoff_in(msgspec.json.encode(rest)) is None


@pytest.mark.parametrize("params", [b"", b"no JSON", b"null", b"[]", b'{"a":', b"\xff{}", b"[" * 100_000])
def test_what_is_not_transfer_parameters_is_none(params: bytes) -> None:
    assert handoff_in(params) is None


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": True}, {GIVE_UP_FIELD: None}])
def test_other_requests_give_nothing_up(params: dict[str, Any] | None) -> None:
    assert given_up(params) is None


@pytest.mark.parametrize(
    "told",
    [
        7, "x", [], {}, {"engine": "d"}, {"engine": 7, "handoffs": []}, {"engine": "d", "handoffs": [7]},
        {"engine": "d", "handoffs": [{**PARAMS, "remote_port": "5600"}]},
        {"engine": "d", "handoffs": [PARAMS] * (MAX_HANDOFFS + 1)},
    ],
)  # fmt: skip
def test_what_cannot_be_read_gives_up_nothing_and_is_no_other_request(told: Any) -> None:
    """An error here would end the engine."""
    assert given_up({GIVE_UP_FIELD: told}) is NOTHING


@pytest.mark.parametrize(
    ("named", "engine", "meant"),
    [("d", "d", True), ("d", "d_dp3", True), ("d_dp1", "d_dp1", True), ("d_dp1", "d_dp12", False), ("d", "e", False),
     ("", "", False), ("", "_dp1", False), (".", "d", False), ("d_dp0", "d", False)],
)  # fmt: skip
def test_an_engine_knows_whether_it_is_meant(named: str, engine: str, meant: bool) -> None:
    assert GivenUp(named, []).is_for(engine) is meant

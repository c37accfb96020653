from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from vllm_pd.router.legs import MAX_PRIORITY, decode_body, prefill_body, prioritised_body, transfer_params

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def prefill(body: dict[str, object]) -> dict[str, object]:
    out = json.loads(prefill_body(json.dumps(body).encode()))
    assert isinstance(out, dict)
    return out


def test_prefill_leg_asks_for_one_token_and_the_transfer() -> None:
    assert prefill({"model": "m", "prompt": "p"}) == {
        "model": "m",
        "prompt": "p",
        "max_tokens": 1,
        "stream": False,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        },
    }


def test_prefill_leg_sets_the_newer_limit_only_where_the_client_used_it() -> None:
    assert prefill({"max_completion_tokens": 90})["max_completion_tokens"] == 1
    assert "max_completion_tokens" not in prefill({"max_tokens": 90})


@pytest.mark.parametrize(
    "field",
    [
        "stream_options",
        "n",
        "best_of",
        "min_tokens",
        "stop",
        "stop_token_ids",
        "include_stop_str_in_output",
        "logprobs",
        "top_logprobs",
        "logprob_token_ids",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "echo",
    ],
)
def test_prefill_leg_drops_what_is_about_the_answer(field: str) -> None:
    assert field not in prefill({"prompt": "p", field: 3})


@pytest.mark.parametrize(
    "field",
    [
        "tools",
        "tool_choice",
        "chat_template",
        "chat_template_kwargs",
        "add_generation_prompt",
        "continue_final_message",
        "add_special_tokens",
        "truncate_prompt_tokens",
        "truncation_side",
        "documents",
        "reasoning_effort",
        "cache_salt",
        "mm_processor_kwargs",
        "media_io_kwargs",
        "response_format",
        "priority",
        "seed",
        "logit_bias",
        "a_field_of_next_year",
    ],
)
def test_prefill_leg_keeps_what_may_shape_the_prompt(field: str) -> None:
    assert prefill({"prompt": "p", field: {"a": [1]}})[field] == {"a": [1]}


def test_prefill_leg_carries_values_byte_for_byte() -> None:
    body = b'{"prompt": "\\u00e9\\ud83d\\ude00 \xc3\xa9", "x": 1.10, "big": 123456789012345678901234567890}'
    out = prefill_body(body)
    assert b'"\\u00e9\\ud83d\\ude00 \xc3\xa9"' in out
    assert b"1.10" in out
    assert b"123456789012345678901234567890" in out


@pytest.mark.parametrize("body", [b"", b"[1]", b'{"a":'])
def test_prefill_leg_of_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        prefill_body(body)


@given(st.dictionaries(st.text(max_size=8).filter(lambda k: k != "kv_transfer_params"), JSON, min_size=1, max_size=5))
def test_decode_leg_is_the_clients_object_plus_the_parameters(body: dict[str, object]) -> None:
    raw = json.dumps(body, ensure_ascii=False, indent=1).encode("utf-8", "surrogatepass")
    spliced = decode_body(raw, b'{"remote_port":1}')
    assert json.loads(spliced) == {**body, "kv_transfer_params": {"remote_port": 1}}
    assert spliced.endswith(raw[1:])


def test_decode_leg_keeps_leading_white_space() -> None:
    assert decode_body(b' \n{"a":1}', b"{}") == b' \n{"kv_transfer_params":{},"a":1}'


def test_transfer_parameters_come_back_as_they_were_written() -> None:
    params = b'{"remote_block_ids": [[1,  2]], "remote_port": 5600}'
    assert transfer_params(b'{"id":"x","kv_transfer_params":' + params + b"}") == params


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"<html>",
        b"[]",
        b"{}",
        b'{"kv_transfer_params":null}',
        b'{"kv_transfer_params":{}}',
        b'{"kv_transfer_params":[1]}',
        b'{"kv_transfer_params":"x"}',
        b'\xff{"kv_transfer_params":{"a":1}}',
    ],
)
def test_answers_without_usable_transfer_parameters(answer: bytes) -> None:
    assert transfer_params(answer) is None


def test_priority_of_the_client_ranks_first_then_the_turn() -> None:
    def told(body: bytes, turn: int) -> int:
        value = json.loads(prioritised_body(body, json.loads(body).get("priority", UNSET), turn))["priority"]
        assert isinstance(value, int) and -(2**63) <= value < 2**63
        return value

    none, zero = b'{"a":1}', b'{"priority":0}'
    now = 1_800_000_000_000
    assert told(none, now) == told(zero, now) == now
    assert told(b'{"priority":1}', now) > told(none, now + 10**12)
    assert told(b'{"priority":-1}', now + 10**12) < told(none, now)
    assert told(b'{"priority":5}', now) < told(b'{"priority":5}', now + 1) < told(b'{"priority":6}', now)
    for most in (-MAX_PRIORITY, MAX_PRIORITY):
        told(b'{"priority":%d}' % most, now)


def test_turn_is_added_behind_the_clients_bytes() -> None:
    assert prioritised_body(b' {"a":1} ', UNSET, 1_700_000_000_000) == b' {"a":1,"priority":1700000000000} '


@pytest.mark.parametrize("own", [None, "high", 1.5, 2**40])
def test_priority_that_cannot_be_combined_stays_for_the_worker_to_judge(own: object) -> None:
    body = json.dumps({"priority": own}).encode()
    assert prioritised_body(body, own, 7) == body


def test_prefill_leg_names_the_hold_by_which_its_blocks_can_be_let_go() -> None:
    params = json.loads(prefill_body(b'{"prompt":"p"}', "k"))["kv_transfer_params"]
    assert params.pop("pd_hold") == "k"
    assert params == json.loads(prefill_body(b'{"prompt":"p"}'))["kv_transfer_params"]

"""What a prefill job carries through the store."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from vllm_pd.state.prefill_payload import (
    PrefillAnswer,
    PrefillRequest,
    decode_answer,
    decode_request,
    encode_answer,
    encode_request,
    without_credentials,
)

REQUEST = PrefillRequest(
    path="/v1/completions?x=1",
    headers=[("X-Request-Id", "a-prefill"), ("Content-Type", "application/json")],
    body=b'{"prompt":"\xc3\xa4"}',
    deadline_ms=1_800_000_000_000,
    timeout_ms=30_000,
)
ANSWER = PrefillAnswer(status=200, body=b'{"kv_transfer_params":{}}', computed_ms=12)


def test_both_come_back_equal() -> None:
    assert decode_request(encode_request(REQUEST)) == REQUEST
    assert decode_answer(encode_answer(ANSWER)) == ANSWER


def test_a_newer_version_may_add_fields() -> None:
    newer = msgspec.msgpack.encode({**dataclasses.asdict(REQUEST), "later": 1})
    assert decode_request(newer) == REQUEST


@pytest.mark.parametrize("data", [b"", b"\x00", b"{}", b"\xc1", msgspec.msgpack.encode({"path": 3})])
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        decode_request(data)
    with pytest.raises(ValueError):
        decode_answer(data)


@pytest.mark.parametrize("path", ["", "v1/completions", "//elsewhere/v1", "http://elsewhere/v1", "@elsewhere/v1"])
def test_a_path_names_no_other_server(path: str) -> None:
    data = msgspec.msgpack.encode({**dataclasses.asdict(REQUEST), "path": path})
    with pytest.raises(ValueError, match="must begin with one slash"):
        decode_request(data)


def test_credentials_stay_out_of_the_store() -> None:
    headers = [("authorization", "Bearer x"), ("Cookie", "a=b"), ("X-Api-Key", "k"), ("X-Request-Id", "r")]
    assert without_credentials(headers) == [("X-Request-Id", "r")]

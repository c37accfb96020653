"""Clients that send transfer parameters of their own: no worker gets them, unless the operator wants that."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.router.conftest import LONG, PD, StartCluster, StartWorker
from vllm_pd.errors import SettingsError
from vllm_pd.router.client_transfer import own_transfer
from vllm_pd.router.endpoints import INFERENCE
from vllm_pd.router.settings import load
from vllm_pd.state import Role

READS = {"do_remote_prefill": True, "remote_block_ids": [[1]], "remote_engine_id": "e", "remote_request_id": "x"}
BODY = {"prompt": LONG, "max_tokens": 20}
PATH = "/v1/completions"


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        ({"kv_transfer_params": READS}, "kv_transfer_params"),
        ({"kv_transfer_params": {"pd_release": ["somebody"]}}, "kv_transfer_params"),
        ({"kv_transfer_params": {}}, "kv_transfer_params"),
        ({"kv_transfer_params": "x"}, "kv_transfer_params"),
        ({"ec_transfer_params": {"a": 1}}, "ec_transfer_params"),
        ({"vllm_xargs": {"kv_transfer_params": "x"}}, "vllm_xargs.kv_transfer_params"),
        ({"n": "1", "kv_transfer_params": READS}, "kv_transfer_params"),
    ],
)
async def test_they_are_refused_and_no_worker_sees_them(pd: PD, extra: dict[str, Any], field: str) -> None:
    code, answer = await pd.cluster.post(PATH, {**BODY, **extra})
    assert code == 400
    error = json.loads(answer)["error"]
    assert error["type"] == "BadRequestError"
    assert error["message"].startswith(f"{field} is for the router and its workers alone")
    assert "--client-transfer-params pass" in error["message"]
    assert not pd.prefill.posts + pd.decode.posts
    assert pd.cluster.metric("requests_total", endpoint=PATH, status="400") == 1


async def test_every_endpoint_refuses_them(pd: PD) -> None:
    for path in [endpoint.path for endpoint in INFERENCE] + ["/v1/explain", "/v1/explain?path=/v1/completions"]:
        assert (await pd.cluster.post(path, {**BODY, "kv_transfer_params": READS}))[0] == 400
    assert not pd.prefill.posts + pd.decode.posts


@pytest.mark.parametrize(
    "extra", [{"kv_transfer_params": None}, {"vllm_xargs": {"a": 1}}, {"about": "transfer_params"}]
)
async def test_null_and_other_fields_are_served(pd: PD, extra: dict[str, Any]) -> None:
    assert (await pd.cluster.post(PATH, {**BODY, **extra}))[0] == 200
    assert (await pd.cluster.post("/v1/explain", {**BODY, **extra}))[0] == 200


async def test_they_pass_where_the_operator_trusts_all_clients(
    start_cluster: StartCluster, start_worker: StartWorker
) -> None:
    cluster = await start_cluster(client_transfer_params="pass")
    prefill, decode = await start_worker(), await start_worker()
    await cluster.join(prefill, Role.PREFILL)
    await cluster.join(decode, Role.DECODE)
    body = json.dumps({**BODY, "kv_transfer_params": READS}).encode()
    assert (await cluster.post(PATH, body))[0] == 200
    assert prefill.posts == []
    assert decode.posts[0].raw == body
    assert cluster.metric("bypass_total", reason="own_transfer_params") == 1


@pytest.mark.parametrize(
    "body",
    [
        b'{"kv_transfer_param\\u0073":{"a":1}}',
        b'{"\\u006bv_transfer_params":{"a":1}}',
        b'{"kv_transfer_params":null,"kv_transfer_params":{"a":1}}',
        b'{"vllm_xargs":{"kv_transfer_param\\u0073":"x"}}',
        # What Python's json reads, and msgspec does not.
        b'{"a":NaN,"kv_transfer_params":{"a":1}}',
        b'{"a":NaN,"kv_transfer_param\\u0073":{"a":1}}',
        b'{"a":"\\ud800","kv_transfer_params":{"a":1}}',
        b'\xef\xbb\xbf{"kv_transfer_params":{"a":1}}',
        *('{"kv_transfer_params":{"a":1}}'.encode(code) for code in ("utf-16", "utf-16-le", "utf-32-be")),
        *('{"kv_transfer_param\\u0073":{"a":1}}'.encode(code) for code in ("utf-16-be", "utf-32")),
        b'{"a":"\xed\xa0\x80","kv_transfer_params":{"a":1}}',
    ],
)
def test_they_cannot_be_hidden(body: bytes) -> None:
    found = json.loads(body)
    assert found.get("kv_transfer_params") or found["vllm_xargs"]["kv_transfer_params"]
    assert own_transfer(body).endswith(".")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"\x1f\x8b\x08\x00\x00\x00transfer_params",
        b'{"prompt":"kv_transfer_params"}',
        b'{"prompt":"\\u00e9"}',
        b'{"prompt":{"kv_transfer_params":{"a":1}}}',
        b'{"kv_transfer_params":{"a":1},"kv_transfer_params":null}',
        b'{"kv_transfer_params": null , "ec_transfer_params":null}',
        b'{"vllm_xargs":"kv_transfer_params"}',
        b'{"vllm_xargs":{"kv_transfer_params":null}}',
        b'{"vllm_xargs":null,"prompt":"transfer_params"}',
        b'{"a":NaN}',
    ],
)
def test_everything_else_is_for_the_worker_to_judge(body: bytes) -> None:
    assert own_transfer(body) == ""


def test_the_setting_is_one_of_two_words() -> None:
    store = {"store": "redis://h"}
    assert load(flags=store).value.client_transfer_params == "refuse"
    environ = {"VLLM_PD_ROUTER_CLIENT_TRANSFER_PARAMS": "pass"}
    assert load(flags=store, environ=environ).value.client_transfer_params == "pass"
    with pytest.raises(SettingsError, match="--client-transfer-params must be one of refuse, pass"):
        load(flags={**store, "client_transfer_params": "no"})

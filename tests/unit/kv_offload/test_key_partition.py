"""Same tokens under another adapter, salt, media, revision or dtype never hit: vLLM's own keys over real files."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

from tests.unit.kv_offload.tiered import CHUNKS, Engine
from vllm_pd.vllm_compat import LookupResult, ReqContext, make_offload_key

pytestmark = pytest.mark.vllm

BLOCK = 32
BLOCKS = 3
TOKENS = list(range(BLOCK * BLOCKS))


def adapter(name: str, path: str) -> dict[str, Any]:
    return {"lora_request": LoRARequest(name, 1, path)}


def media(identifier: str, offset: int = 4) -> dict[str, Any]:
    place = PlaceholderRange(offset=offset, length=8)
    return {"mm_features": [MultiModalFeatureSpec(None, "image", identifier, place)]}


REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "another first token": {"prompt_token_ids": [999, *TOKENS[1:]]},
    "salt": {"cache_salt": "a"},
    "another salt": {"cache_salt": "b"},
    "adapter": adapter("a", "/a"),
    "another adapter": adapter("b", "/a"),
    "adapter of the same name elsewhere": adapter("a", "/b"),
    "adapter and salt": {**adapter("a", "/a"), "cache_salt": "a"},
    "image": media("x"),
    "another image": media("y"),
    "image elsewhere": media("x", offset=5),
    "embeddings": {"prompt_token_ids": None, "prompt_embeds": torch.zeros(len(TOKENS), 4)},
    "other embeddings": {"prompt_token_ids": None, "prompt_embeds": torch.ones(len(TOKENS), 4)},
}

SERVERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "another revision": {"ssd": {"identity": "another revision"}},
    "another dtype": {"dtype": "float16"},
    "another layout": {"kv_cache_layout": "BLHNC"},
}


@pytest.fixture(autouse=True)
def seed() -> None:
    kv_cache_utils.init_none_hash(sha256_cbor)


def keys(changes: dict[str, Any]) -> list[bytes]:
    """The offload keys of a request's blocks, made by vLLM."""
    fields = {"prompt_token_ids": TOKENS, **changes}
    request = Request(
        request_id="r",
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=kv_cache_utils.get_request_block_hasher(BLOCK, sha256_cbor),
        **fields,
    )
    assert len(request.block_hashes) == BLOCKS
    return [make_offload_key(block_hash, 0) for block_hash in request.block_hashes]


def test_no_two_kinds_of_request_have_a_block_in_common() -> None:
    for (one, its), (other, others) in itertools.combinations(REQUESTS.items(), 2):
        assert set(keys(its)).isdisjoint(keys(others)), f"{one} and {other}"


def test_what_one_kind_of_request_stored_no_other_finds_and_the_same_one_does(
    start: Callable[..., Engine], tmp_path: Path
) -> None:
    engine = start()
    store(engine, keys(REQUESTS["plain"]))
    for name, changes in REQUESTS.items():
        assert finds(engine, keys(changes)) is (name == "plain"), name


@pytest.mark.parametrize("name", SERVERS)
def test_what_one_kind_of_server_stored_no_other_finds(start: Callable[..., Engine], name: str) -> None:
    first = start()
    store(first, keys({}))
    first.stop()
    changes = dict(SERVERS[name])
    if "dtype" in changes:
        first_model = first.spec.config.model
        changes["model"] = type(first_model)(first_model.name, changes.pop("dtype"))
    again = start(**changes)
    again.settle()
    assert finds(again, keys({})) is (name == "plain")


def test_a_block_of_another_kv_group_is_another_block(start: Callable[..., Engine]) -> None:
    engine = start()
    store(engine, keys({}))
    assert not finds(engine, [key[:-4] + (1).to_bytes(4, "big") for key in keys({})])


def store(engine: Engine, its: list[bytes]) -> None:
    assert len(its) <= CHUNKS
    context = ReqContext(req_id="store")
    engine.manager.on_new_request(context)
    output = engine.manager.prepare_store(its, context)
    engine.manager.complete_store(output.keys_to_store, context)
    engine.manager.on_request_finished(context)
    engine.settle()
    engine.forget_memory()


def finds(engine: Engine, its: list[bytes]) -> bool:
    context = ReqContext(req_id="find")
    engine.tier.on_new_request(context)
    found = {engine.tier.lookup(key, context) for key in its}
    engine.tier.on_request_finished(context)
    assert len(found) == 1
    return found == {LookupResult.HIT}

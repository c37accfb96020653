"""Block hashes held against vLLM's own functions, and what must never be equal."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_pd.block_hash import KEY_BYTES, BlockHasher, Lora, extra_keys, key_of

token_ids = st.lists(
    st.integers(0, 300) | st.integers(0, 200_000) | st.integers(1 << 20, (1 << 32) + 5), min_size=0, max_size=200
)
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=300)
loras = st.none() | st.builds(Lora, texts, texts)
salts = st.none() | texts


@pytest.fixture(scope="module")
def vllm_hashes() -> Iterator[Any]:
    """The hashes that vLLM's scheduler would compute, by a `Request` of its own."""
    pytest.importorskip("vllm")
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.request import Request

    def hashes(ids: list[int], block_size: int, lora: Lora | None, salt: str | None, seed: str) -> list[bytes]:
        with pytest.MonkeyPatch.context() as patch:
            if seed:
                patch.setenv("PYTHONHASHSEED", seed)
            else:
                patch.delenv("PYTHONHASHSEED", raising=False)
            kv_cache_utils.init_none_hash(sha256_cbor)
        request = Request(
            "id",
            list(ids),
            SamplingParams(max_tokens=1),
            None,
            lora_request=None if lora is None else LoRARequest(lora.name, 1, lora.path),
            cache_salt=salt,
            block_hasher=kv_cache_utils.get_request_block_hasher(block_size, sha256_cbor),
        )
        return [bytes(value) for value in request.block_hashes]

    yield hashes
    kv_cache_utils.init_none_hash(sha256_cbor)


@pytest.mark.vllm
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_hashes_are_those_of_vllm(vllm_hashes: Any, data: st.DataObject) -> None:
    ids, lora, salt = data.draw(token_ids), data.draw(loras), data.draw(salts)
    block_size, seed = (
        data.draw(st.sampled_from([1, 2, 7, 16, 24, 32, 100])),
        data.draw(st.sampled_from(["", "0", "7"])),
    )
    ours = BlockHasher(block_size, "sha256_cbor", seed).chain(ids, extra_keys(lora, salt))
    assert ours == vllm_hashes(ids or [0], block_size, lora, salt, seed)[: len(ids) // block_size]


@pytest.mark.vllm
def test_long_blocks_and_long_texts_are_hashed_as_by_vllm(vllm_hashes: Any) -> None:
    ids = list(range(70_000))
    lora = Lora("é" * 40_000, "x" * 70_000)
    for size in (300, 66_000):
        ours = BlockHasher(size).chain(ids, extra_keys(lora, "s" * 200))
        assert ours == vllm_hashes(ids, size, lora, "s" * 200, "")


@settings(max_examples=100, deadline=None)
@given(ids=token_ids, cut=st.integers(0, 20), lora=loras, salt=salts)
def test_a_chain_goes_on_from_any_block(ids: list[int], cut: int, lora: Lora | None, salt: str | None) -> None:
    hasher, extra = BlockHasher(8), extra_keys(lora, salt)
    whole = hasher.chain(ids, extra)
    done = min(cut, len(whole))
    parent = whole[done - 1] if done else None
    assert whole[:done] + hasher.chain(ids[done * 8 :], extra, parent=parent) == whole
    assert hasher.keys(ids, extra) == [value[:KEY_BYTES] for value in whole] == list(map(key_of, whole))


def test_equal_tokens_with_another_adapter_path_salt_or_seed_share_no_block() -> None:
    ids = list(range(64))
    variants = [
        BlockHasher(16, hash_seed=seed).keys(ids, extra_keys(lora, salt))
        for lora in (None, Lora("a", "/a"), Lora("b", "/a"), Lora("a", "/b"))
        for salt in (None, "a", "b")
        for seed in ("", "0")
    ]
    found = [key for keys in variants for key in keys]
    assert len(found) == len(set(found)) == 4 * 24


def test_a_salt_and_an_adapter_of_one_text_differ() -> None:
    hasher, ids = BlockHasher(2), [1, 2, 3, 4]
    assert not set(hasher.keys(ids, extra_keys(Lora("x", "x")))) & set(hasher.keys(ids, extra_keys(cache_salt="x")))


def test_what_cannot_be_recomputed_is_refused() -> None:
    for algorithm in ("sha256", "xxhash_cbor", ""):
        with pytest.raises(ValueError, match="--prefix-caching-hash-algo sha256_cbor"):
            BlockHasher(16, algorithm)
    with pytest.raises(ValueError, match="at least one token"):
        BlockHasher(0)
    with pytest.raises(ValueError):
        extra_keys(cache_salt="\ud800")


def test_ids_that_grow_the_table_from_several_threads_are_encoded_right() -> None:
    from concurrent.futures import ThreadPoolExecutor

    hash_from = partial(BlockHasher(4).chain, extra=None)
    prompts = [[70_000 + 1000 * i + j for j in range(8)] for i in range(40)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(hash_from, prompts))
    assert found == [hash_from(prompt) for prompt in prompts]
    assert len({value for chain in found for value in chain}) == 80

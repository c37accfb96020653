"""Whatever changes the bytes of a block changes the namespace, and nothing else does."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.kv_offload.engine import offloading_config
from vllm_pd.kv_offload.ssd_namespace import Namespace, fingerprint, model_identity, namespace

pytestmark = pytest.mark.vllm

CONFIG = offloading_config({})


def parallel(**changes: Any) -> dict[str, Any]:
    return {"parallel": dataclasses.replace(CONFIG.parallel, **changes)}


def model(**changes: Any) -> dict[str, Any]:
    return {"model": dataclasses.replace(CONFIG.model, **changes)}


@pytest.mark.parametrize(
    "changes",
    [
        model(name="acme/other"),
        model(dtype="float16"),
        {"kv_cache_layout": "BLHNC"},
        {"canonical_layout": True},
        {"replicated_layout": True},
        {"worker_kv_bytes_per_block": 1},
        {"cache": dataclasses.replace(CONFIG.cache, blocks_per_chunk=2)},
        {"cache": dataclasses.replace(CONFIG.cache, tokens_per_hash=16)},
        {"groups": (dataclasses.replace(CONFIG.groups[0], tokens_per_block=64),)},
        {"groups": (dataclasses.replace(CONFIG.groups[0], layer_names=("layer.1",)),)},
        {"groups": (*CONFIG.groups, dataclasses.replace(CONFIG.groups[0], group_id=1))},
        parallel(world_size=2, tp_size=2),
        parallel(world_size=2, pp_size=2),
        parallel(pcp_size=2),
        parallel(dcp_size=2),
    ],
    ids=lambda changes: "-".join(changes),
)
def test_the_engines_layout_is_in_it(changes: dict[str, Any]) -> None:
    one, other = namespace(CONFIG, "id"), namespace(dataclasses.replace(CONFIG, **changes), "id")
    assert one.digest != other.digest and one.name != other.name


@pytest.mark.parametrize(
    "changes", [{"engine_id": "other"}, {"enable_kv_cache_events": True}, {"extra_config": {"a": 1}}]
)
def test_what_does_not_change_the_bytes_is_not_in_it(changes: dict[str, Any]) -> None:
    assert namespace(CONFIG, "id") == namespace(dataclasses.replace(CONFIG, **changes), "id")


def test_the_identity_and_the_seed_of_the_hashes_are_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [namespace(CONFIG, "id").name, namespace(CONFIG, "another").name]
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    names.append(namespace(CONFIG, "id").name)
    assert len(set(names)) == 3


def test_local_weights_are_in_it_in_a_folder_or_a_file(tmp_path: Path) -> None:
    weights = tmp_path / "w.gguf"
    weights.write_bytes(b"1")
    for path in (tmp_path, weights):
        local = dataclasses.replace(CONFIG, **model(name=str(path)))
        weights.write_bytes(b"1")
        before = namespace(local, "id").digest
        assert namespace(local, "id").digest == before
        weights.write_bytes(b"other")
        assert namespace(local, "id").digest != before


def test_a_name_on_a_hub_has_no_files_to_look_at() -> None:
    assert fingerprint(Path("acme/tiny")) == []


@pytest.mark.parametrize("name", ["acme/tiny", "/", "../..", "ü" * 300, "a b\nc"])
def test_the_folders_name_is_harmless_and_tells_the_model(name: str) -> None:
    made = namespace(dataclasses.replace(CONFIG, **model(name=name)), "id")
    assert "/" not in made.name and not made.name.startswith(".") and len(made.name.encode()) < 100
    assert len(made.digest) == 32 and made.about["model"] == name
    assert "tiny" in made.name or name != "acme/tiny"


def test_data_parallel_engines_have_the_same_blocks_in_folders_of_their_own() -> None:
    ranks = [
        namespace(dataclasses.replace(CONFIG, **parallel(data_parallel_index=rank, data_parallel_size=2)), "id")
        for rank in (0, 1)
    ]
    assert ranks[0].digest == ranks[1].digest == namespace(CONFIG, "id").digest
    assert len({each.name for each in ranks}) == 2


def test_one_apart_is_like_no_other() -> None:
    base: Namespace = namespace(CONFIG, "id")
    one, other = base.apart(b"1" * 32, "why"), base.apart(b"2" * 32, "why")
    assert len({base.digest, one.digest, other.digest}) == len({base.name, one.name, other.name}) == 3
    assert one.about["apart"] == "why"


def engine(model_changes: dict[str, Any] | None = None, **changes: Any) -> Any:
    fields = {"revision": "main", "dtype": "bfloat16", "quantization": None, "rope": 1, "max_model_len": 4096}
    fields |= model_changes or {}
    hf = {"rope_theta": fields.pop("rope"), "rope_type": fields.pop("rope_type", "default")}
    hf_config = SimpleNamespace(to_dict=lambda: hf, _commit_hash=fields.pop("commit", None))
    cache = {"cache_dtype": "auto", "prefix_caching_hash_algo": "sha256_cbor"}
    return SimpleNamespace(
        model_config=SimpleNamespace(**fields, hf_config=hf_config),
        cache_config=SimpleNamespace(**{**cache, **changes.pop("cache", {})}),
        **changes,
    )


def draft(**changes: Any) -> Any:
    model_config = SimpleNamespace(model="d", **vars(engine(changes).model_config))
    return SimpleNamespace(method="eagle", draft_model_config=model_config)


@pytest.mark.parametrize(
    "changed",
    [
        engine({"revision": "v2"}),
        engine({"dtype": "float16"}),
        engine({"quantization": "fp8"}),
        engine({"rope": 2}),
        engine({"commit": "abc"}),
        engine(cache={"cache_dtype": "fp8"}),
        engine(cache={"kv_cache_dtype_skip_layers": ["0"]}),
        engine(cache={"mamba_ssm_cache_dtype": "float32"}),
        engine(cache={"prefix_caching_hash_algo": "sha256"}),
        engine(load_config=SimpleNamespace(load_format="dummy")),
        engine(attention_config=SimpleNamespace(backend="FLASHINFER")),
        engine({"multimodal_config": SimpleNamespace(mm_processor_kwargs={"size": 1}, media_io_kwargs={})}),
        engine(speculative_config=draft()),
    ],
    ids=range(13),
)
def test_what_the_engine_was_told_of_the_model_is_in_its_identity(changed: Any) -> None:
    assert model_identity(engine()) == model_identity(engine())
    assert model_identity(changed) != model_identity(engine())


def test_a_draft_models_weights_are_in_the_identity() -> None:
    one, other = engine(speculative_config=draft()), engine(speculative_config=draft(revision="v2"))
    assert model_identity(one) != model_identity(other)


def test_the_longest_prompt_matters_where_the_rotation_of_keys_depends_on_it() -> None:
    assert model_identity(engine({"max_model_len": 1})) == model_identity(engine({"max_model_len": 2}))
    longrope = [model_identity(engine({"max_model_len": n, "rope_type": "longrope"})) for n in (1, 2)]
    assert longrope[0] != longrope[1]

"""Bytes of KV per token, from the configs of models as they are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_pd.errors import SettingsError
from vllm_pd.sim.kv_bytes import kv_bytes_per_token

LLAMA_8B: dict[str, Any] = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3: dict[str, Any] = {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
}


def write(folder: Path, config: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config) if not isinstance(config, str) else config)
    return path


@pytest.mark.parametrize(
    ("config", "dtype", "size"),
    [
        (LLAMA_8B, "auto", 131072),
        (LLAMA_8B, "fp8", 65536),
        ({**LLAMA_8B, "num_key_value_heads": None}, "auto", 4 * 131072),
        ({**LLAMA_8B, "head_dim": 64}, "auto", 65536),
        (DEEPSEEK_V3, "auto", 61 * 576 * 2),
        ({"n_layer": 12, "n_head": 12, "n_embd": 768, "torch_dtype": "float32"}, "auto", 12 * 2 * 768 * 4),
        ({"model_type": "llava", "text_config": LLAMA_8B}, "auto", 131072),
        ({**LLAMA_8B, "layer_types": ["full_attention"] * 32}, "auto", 131072),
    ],
)
def test_bytes_of_a_token(tmp_path: Path, config: dict[str, Any], dtype: str, size: int) -> None:
    path = write(tmp_path, config)
    assert kv_bytes_per_token(path, dtype) == kv_bytes_per_token(tmp_path, dtype) == size


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("not json", "cannot be read"),
        ([1], "not a JSON object"),
        ({"num_hidden_layers": 2}, "num_attention_heads"),
        ({**LLAMA_8B, "torch_dtype": "int3"}, "'int3'"),
        ({**LLAMA_8B, "layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
    ],
)
def test_what_cannot_be_computed_is_to_be_given(tmp_path: Path, config: Any, message: str) -> None:
    with pytest.raises(SettingsError, match=f"{message}.*--kv-bytes-per-token"):
        kv_bytes_per_token(write(tmp_path, config))


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"absent"):
        kv_bytes_per_token(tmp_path / "absent")

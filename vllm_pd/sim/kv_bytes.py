"""How many bytes of KV a model keeps for one token, from its `config.json`. Pure but for reading that file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_pd.errors import SettingsError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1}
_SAY = "give the bytes with --kv-bytes-per-token (vllm serve logs the size of its KV cache)"


def kv_bytes_per_token(model: Path, cache_dtype: str = "auto") -> int:
    """Bytes over all layers and all workers of one copy of the model.

    Args:
        model: a config.json, or the folder of a model.
        cache_dtype: as `--kv-cache-dtype` of vllm serve; `auto` is the model's own.

    Raises:
        SettingsError: the file cannot be read, or describes a model whose layers keep different things.
    """
    path = model / "config.json" if model.is_dir() else model
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise SettingsError(f"The model's {path} cannot be read ({e}); {_SAY}.") from None
    if not isinstance(config, dict):
        raise SettingsError(f"The model's {path} is not a JSON object; {_SAY}.")
    # A model that sees or hears has its language part in an object of its own.
    inner = config.get("text_config")
    text = {**config, **inner} if isinstance(inner, dict) else config
    _check_uniform(text, path)
    layers = _number(text, path, "num_hidden_layers", "n_layer")
    dtype = str(text.get("dtype") or text.get("torch_dtype") or "bfloat16") if cache_dtype == "auto" else cache_dtype
    if dtype not in DTYPE_BYTES:
        raise SettingsError(f"The size of a value of dtype {dtype!r} is not known; {_SAY}.")
    if "kv_lora_rank" in text:
        # Multi-head latent attention: one compressed vector a layer, for keys and values together.
        values = _number(text, path, "kv_lora_rank") + int(text.get("qk_rope_head_dim") or 0)
    else:
        heads = _number(text, path, "num_attention_heads", "n_head")
        kv_heads = int(text.get("num_key_value_heads") or heads)
        head = int(text.get("head_dim") or 0) or _number(text, path, "hidden_size", "n_embd") // heads
        values = 2 * kv_heads * head
    return layers * values * DTYPE_BYTES[dtype]


def _number(config: Mapping[str, Any], path: Path, *names: str) -> int:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    raise SettingsError(f"{path} has no {names[0]}; {_SAY}.")


def _check_uniform(config: Mapping[str, Any], path: Path) -> None:
    kinds = config.get("layer_types") or config.get("layers_block_type")
    if isinstance(kinds, list) and len(set(map(str, kinds))) > 1:
        raise SettingsError(
            f"The layers of {path} differ ({', '.join(sorted(set(map(str, kinds))))}), so their KV does not grow alike "
            f"with the prompt; {_SAY}."
        )

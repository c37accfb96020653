"""Which blocks are the same bytes: the name and the digest of the folder they lie in.

A block's key is the hash of its tokens and of what vLLM adds to them (adapter, salt, media). Everything else that
changes the bytes must be in here, or a server would take another model's blocks for its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_pd.vllm_compat import OffloadingConfig, current_platform
from vllm_pd.vllm_compat.version import vllm_version

_NAME_DIGITS = 16


@dataclass(frozen=True, slots=True)
class Namespace:
    """Attributes:
    name: of the folder: the model's name, readable, and part of the digest.
    digest: 32 bytes.
    about: what it is, for people.
    """

    name: str
    digest: bytes
    about: Mapping[str, str]

    def apart(self, salt: bytes, why: str) -> Namespace:
        """Another one, for blocks that no other server can have: nothing else has the salt."""
        digest = hashlib.sha256(self.digest + salt).digest()
        return Namespace(f"{self.name}-{digest.hex()[:8]}", digest, {**self.about, "apart": why})


def namespace(config: OffloadingConfig, identity: str) -> Namespace:
    """Of the blocks that this engine makes. Each data-parallel engine has a folder of its own, for one store writes it.

    Args:
        identity: `model_identity`, of what is not in `config`.
    """
    parallel = config.parallel
    fields = {
        "identity": identity,
        "model": config.model.name,
        "weights": fingerprint(Path(config.model.name)),
        "dtype": config.model.dtype,
        "vllm": vllm_version(),
        "layout": config.kv_cache_layout,
        "canonical": config.canonical_layout,
        "replicated": config.replicated_layout,
        "bytes_per_block": config.worker_kv_bytes_per_block,
        "cache": asdict(config.cache),
        "groups": [asdict(group) for group in config.groups],
        # How a block is cut among the workers, whose parts lie one after the other in a row of the tier.
        "parallel": {
            name: getattr(parallel, name) for name in ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")
        },
        "device": _device_format(),
        # Seeds the hashes: with another one nothing here is ever found.
        "hash_seed": os.environ.get("PYTHONHASHSEED", ""),
    }
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).digest()
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", config.model.name).strip("._")[-48:] or "model"
    about = {
        "model": config.model.name,
        "dtype": config.model.dtype,
        "layout": str(config.kv_cache_layout),
        "tensor_parallel": str(parallel.tp_size),
        "pipeline_parallel": str(parallel.pp_size),
        "device": _device_format(),
        "vllm": vllm_version(),
    }
    rank = f"-dp{parallel.data_parallel_index}" if parallel.data_parallel_size > 1 else ""
    return Namespace(f"{name}-{digest.hex()[:_NAME_DIGITS]}{rank}", digest, about)


def model_identity(vllm_config: Any) -> str:
    """Digest of what in the engine's settings changes KV bytes but is not in `OffloadingConfig`."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    fields = {
        "model": _model(model),
        "cache": {
            name: str(getattr(cache, name, None))
            for name in (
                "cache_dtype",
                "kv_cache_dtype_skip_layers",
                "prefix_caching_hash_algo",
                "mamba_cache_dtype",
                "mamba_ssm_cache_dtype",
                "mamba_cache_mode",
                "mamba_block_size",
            )
        },
        "media": [
            str(getattr(getattr(model, "multimodal_config", None), name, None))
            for name in ("mm_processor_kwargs", "media_io_kwargs")
        ],
        "load_format": str(getattr(getattr(vllm_config, "load_config", None), "load_format", None)),
        "attention": str(getattr(getattr(vllm_config, "attention_config", None), "backend", None)),
        "draft": _draft(getattr(vllm_config, "speculative_config", None)),
    }
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()


def fingerprint(path: Path) -> list[tuple[str, int, int]]:
    """Names, sizes and times of local weights, a folder or a file: new weights under an old path are other weights.

    Empty for what is not there, such as a name on a hub.
    """
    try:
        files = sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]
        return [(p.name, (info := p.stat()).st_size, info.st_mtime_ns) for p in files]
    except OSError:
        return []


def _model(model: Any) -> dict[str, Any]:
    hf_config = model.hf_config.to_dict()
    return {
        "revision": model.revision,
        # The commit that a branch such as "main" stood for when the model was loaded from the hub's cache.
        "commit": getattr(model.hf_config, "_commit_hash", None),
        "dtype": str(model.dtype),
        "quantization": model.quantization,
        "hf_config": hf_config,
        # LongRoPE turns keys by one of two tables, depending on the longest prompt that the server takes.
        "longrope": model.max_model_len if "longrope" in json.dumps(hf_config, default=str) else None,
    }


def _draft(speculative: Any) -> dict[str, Any] | None:
    """A draft model's layers have KV of their own in the same blocks."""
    model = getattr(speculative, "draft_model_config", None)
    if model is None:
        return None
    return {
        "method": str(getattr(speculative, "method", None)),
        "name": str(model.model),
        "weights": fingerprint(Path(str(model.model))),
        **_model(model),
    }


def _device_format() -> str:
    """vLLM's CPU attention kernels order a block by instruction set; on accelerators the layout's name says it all."""
    if not current_platform.is_cpu():
        return f"{current_platform.device_type}-{current_platform.get_device_name()}"
    amx = torch.cpu._is_amx_tile_supported()
    return f"cpu-{platform.machine()}-{'amx' if amx else 'vec'}"

"""What the SSD tier is told, and where in the given folder its files lie.

Block files are named by the hash of their tokens, so the folder must separate everything else that changes the bytes
of a block. vLLM's file tier separates the model's name, the cache dtype, block sizes, layer names and parallelism;
`namespace` adds the rest.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_pd.errors import SettingsError
from vllm_pd.vllm_compat import OffloadingConfig, current_platform, vllm_version

GIB = 1 << 30
ROOT_NAME = "vllm-pd-kv-1"
"""Folder under the given path; the number is raised when the layout below it changes."""

READ_THREADS = 8
WRITE_THREADS = 4

_FORMAT_DIGEST = 16


@dataclass(frozen=True, slots=True)
class SsdConfig:
    """The option `ssd`.

    Attributes:
        path: folder; created if absent, files go to a folder of our own inside it.
        budget_bytes: bytes that everything below `path/ROOT_NAME` may take, over all models and servers using it.
        floor_bytes: free space that is kept on the file system; None is 5% of it, at least 1 GiB.
        identity: anything else that changes the bytes of a block, such as `model_identity` of the engine's settings.
    """

    path: Path
    budget_bytes: int
    floor_bytes: int | None = None
    identity: str = ""

    @property
    def root(self) -> Path:
        return self.path / ROOT_NAME

    @classmethod
    def parse(cls, raw: Any) -> SsdConfig:
        """From `{"path": ..., "gib": ..., "free_gib": ..., "identity": ...}`; the last two may be absent.

        Raises:
            SettingsError: one sentence that says what to change.
        """
        if not isinstance(raw, Mapping):
            raise SettingsError(f"ssd must be an object with path and gib, got {raw!r}.")
        unknown = sorted(set(raw) - {"path", "gib", "free_gib", "identity"})
        if unknown:
            raise SettingsError(
                f"ssd has the unknown key {unknown[0]!r}; known keys are path, gib, free_gib, identity."
            )
        path, identity = raw.get("path"), raw.get("identity", "")
        if not isinstance(path, str) or not path.strip():
            raise SettingsError(f"ssd.path must name a folder, got {path!r}.")
        if not isinstance(identity, str):
            raise SettingsError(f"ssd.identity must be a text, got {identity!r}.")
        free = raw.get("free_gib")
        return cls(
            Path(path).expanduser(),
            int(_number("ssd.gib", raw.get("gib"), exclusive=True) * GIB),
            None if free is None else int(_number("ssd.free_gib", free) * GIB),
            identity,
        )


def _number(name: str, raw: Any, *, exclusive: bool = False) -> float:
    valid = isinstance(raw, int | float) and not isinstance(raw, bool) and raw >= 0 and raw < float("inf")
    if not valid or (exclusive and raw == 0):
        raise SettingsError(f"{name} must be a number {'above' if exclusive else 'of at least'} 0, got {raw!r}.")
    return float(raw)


def tier_config(ssd: SsdConfig, config: OffloadingConfig) -> dict[str, Any]:
    """The entry of vLLM's `secondary_tiers` that makes its factory build our `BoundedFileTier`."""
    return {
        "type": "BoundedFileTier",
        "module_path": "vllm_pd.kv_offload.ssd_tier",
        "root_dir": str(ssd.root / namespace(config, ssd.identity)),
        "sweep_root": str(ssd.root),
        "budget_bytes": ssd.budget_bytes,
        "floor_bytes": ssd.floor_bytes,
        "n_read_threads": READ_THREADS,
        "n_write_threads": WRITE_THREADS,
    }


def namespace(config: OffloadingConfig, identity: str) -> str:
    """Folder name for blocks of exactly this kind: the model's name, readable, and a digest."""
    fields = {
        "identity": identity,
        "model": config.model.name,
        "weights": _local_fingerprint(Path(config.model.name)),
        "dtype": config.model.dtype,
        "vllm": vllm_version(),
        "layout": config.kv_cache_layout,
        "canonical": config.canonical_layout,
        "replicated": config.replicated_layout,
        "bytes_per_block": config.worker_kv_bytes_per_block,
        "world_size": config.parallel.world_size,
        "device": _device_format(),
    }
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:_FORMAT_DIGEST]
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", config.model.name).strip("._")[-48:]
    return f"{name}-{digest}"


def model_identity(vllm_config: Any) -> str:
    """What of the engine's settings changes KV bytes but is not in `OffloadingConfig`, for `SsdConfig.identity`."""
    model = vllm_config.model_config
    hf_config = model.hf_config
    fields = {
        "revision": model.revision,
        # The commit that a branch such as "main" stood for when the model was loaded from the hub's cache.
        "commit": getattr(hf_config, "_commit_hash", None),
        "dtype": str(model.dtype),
        "quantization": model.quantization,
        "hf_config": hf_config.to_dict(),
        "cache_dtype": str(vllm_config.cache_config.cache_dtype),
        "hash_algo": vllm_config.cache_config.prefix_caching_hash_algo,
    }
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()


def _local_fingerprint(folder: Path) -> list[tuple[str, int, int]]:
    """Names, sizes and times of a local model's files, so that new weights under an old path get a new namespace."""
    if not folder.is_dir():
        return []
    return sorted((p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in folder.iterdir() if p.is_file())


def _device_format() -> str:
    """vLLM's CPU attention kernels order a block by instruction set; on accelerators the layout's name says it all."""
    if not current_platform.is_cpu():
        return str(current_platform.device_type)
    amx = torch.cpu._is_amx_tile_supported()
    return f"cpu-{platform.machine()}-{'amx' if amx else 'vec'}"

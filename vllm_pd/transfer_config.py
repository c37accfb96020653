"""vLLM's KVTransferConfig for the `pd` connector, and the children it stands for. Imports vLLM."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from vllm_pd import lmcache_options
from vllm_pd import settings as s
from vllm_pd.errors import SettingsError
from vllm_pd.kv_offload.ssd_config import SsdConfig
from vllm_pd.state.base import Role
from vllm_pd.tier_choices import DEFAULT_WRITES_PER_DAY, LoadGate
from vllm_pd.vllm_compat import KVTransferConfig, is_nixl_available, vllm_config_class

NIXL = "NixlConnector"
OFFLOADING = "OffloadingConnector"
LOAD_FAILURE_POLICY = "recompute"
"""A block that cannot be loaded is computed again; vLLM's default would fail the request."""

_CHUNK_OPTIONS = {"blocks_per_chunk", "block_size"}
"""Options of the tiers with which a chunk may have several blocks."""
_NIXL_BACKENDS = ("nixl_cu13", "nixl_cu12", "nixl_rocm")


@vllm_config_class
class PDKVTransferConfig(KVTransferConfig):
    """A KVTransferConfig that answers for its children: vLLM asks whether NIXL is used before it allows or adapts
    context parallelism, routed-expert output and state layouts."""

    def has_connector(self, connector_name: str) -> bool:
        if KVTransferConfig.has_connector(self, connector_name):
            return True
        worker = s.from_extra_config(self.kv_connector_extra_config)
        return any(child["kv_connector"] == connector_name for child in child_configs(worker, nixl=nixl_installed()))


def nixl_installed() -> bool:
    """Whether NIXL and one of its backends are installed. Imports neither."""
    return bool(is_nixl_available()) and any(importlib.util.find_spec(name) for name in _NIXL_BACKENDS)


def child_configs(settings: s.WorkerSettings, *, nixl: bool) -> list[dict[str, Any]]:
    """Arguments of the KVTransferConfig of each composed connector, in the order they are asked for blocks.

    NIXL comes first: a request that carries hand-off parameters is served from the prefill worker, any other falls
    through to the tiers or to LMCache.

    Raises:
        SettingsError: nothing would be left to compose.
    """
    children: list[dict[str, Any]] = []
    if nixl:
        children.append(_child(NIXL, settings.nixl))
    if settings.has_tiers:
        offload: dict[str, Any] = {
            "spec_name": "PDOffloadingSpec",
            "cpu_bytes_to_use": settings.cpu_bytes,
            "eviction_policy": settings.eviction,
        }
        if settings.load_gate is not LoadGate.AUTO:
            offload["load_gate"] = str(settings.load_gate)
        if settings.ssd_path:
            offload["spec_name"] = "PDTieringOffloadingSpec"
            offload["ssd"] = _ssd(settings)
        if settings.store and _CHUNK_OPTIONS & settings.tiers.keys():
            # A chunk of several blocks is otherwise announced by the hash of its last one alone.
            offload["self_describing_kv_events"] = True
        own = {name: value for name, value in settings.tiers.items() if name != "ssd"}
        children.append(_child(OFFLOADING, {**offload, **own}))
    if settings.offload == s.LMCACHE:
        options = lmcache_options.connector_options(settings.lmcache_url, settings.lmcache)
        children.append(_child(lmcache_options.CONNECTOR, options))
    if not children:
        raise SettingsError(
            "The pd connector has nothing to do: NIXL is not installed and no tier is configured; "
            "install it with pip install 'vllm-pd[nixl]' or add --pd-cpu-gib."
        )
    return children


def _ssd(settings: s.WorkerSettings) -> dict[str, Any]:
    """The option `ssd`, as far as it is known before the model is.

    Raises:
        SettingsError: an option of `tiers.ssd` is unknown or malformed.
    """
    ssd: dict[str, Any] = {"path": settings.ssd_path, "gib": settings.ssd_gib, **settings.tiers.get("ssd", {})}
    if settings.ssd_writes_per_day != DEFAULT_WRITES_PER_DAY:
        ssd["writes_per_day"] = settings.ssd_writes_per_day
    SsdConfig.parse({**ssd, "identity": "not known yet"})
    return ssd


def check_nixl(settings: s.WorkerSettings) -> bool:
    """Whether prefill/decode hand-off is on for this worker.

    Raises:
        SettingsError: the role needs NIXL and it is not installed.
    """
    if nixl_installed():
        return True
    if settings.role is not Role.BOTH:
        raise SettingsError(
            f"--role {settings.role} hands KV over with NIXL, which is not installed; "
            "install it with pip install 'vllm-pd[nixl]' or use --role both."
        )
    return False


def _child(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": name,
        # Always both: a role is a label that moves at run time, what the engine can do is not.
        "kv_role": "kv_both",
        "kv_load_failure_policy": LOAD_FAILURE_POLICY,
        "kv_connector_extra_config": dict(options),
    }


def build(settings: s.WorkerSettings, base: KVTransferConfig | None = None) -> PDKVTransferConfig:
    """The KVTransferConfig that `--kv-connector pd` stands for.

    Args:
        base: a KVTransferConfig given as JSON, whose engine id and buffer device are kept.
    """
    keep = {} if base is None else {"engine_id": base.engine_id, "kv_buffer_device": base.kv_buffer_device}
    return PDKVTransferConfig(
        kv_connector=s.CONNECTOR,
        kv_role="kv_both",
        kv_load_failure_policy=LOAD_FAILURE_POLICY,
        kv_connector_extra_config=settings.to_extra_config(),
        **keep,
    )

"""Settings of a worker: what `vllm serve --kv-connector pd` can be told, by flag, environment, file or JSON.

The same field names are used everywhere: flag `--pd-cpu-gib`, variable `VLLM_PD_CPU_GIB`, key `cpu_gib` of the YAML
file and of `kv_connector_extra_config`. Imports neither vllm nor torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from vllm_pd import layered, lmcache_options, parsers
from vllm_pd.errors import SettingsError
from vllm_pd.layered import Resolved, setting
from vllm_pd.state.base import Role
from vllm_pd.tier_choices import DEFAULT_EVICTION, DEFAULT_WRITES_PER_DAY, EVICTIONS, LoadGate

CONNECTOR = "pd"
"""Name under which our connector is registered with vLLM."""

DEFAULT_LEASE_S = 10.0
GIB = 1 << 30

TIERS, LMCACHE, NONE = "tiers", "lmcache", "none"
"""What can keep blocks that leave the GPU."""


def _options(raw: Any) -> dict[str, Any]:
    if not isinstance(raw, Mapping):
        raise ValueError(f"must be a mapping of option names to values, got {raw!r}")
    return dict(raw)


def _offload(raw: Any) -> str:
    if isinstance(raw, Mapping):
        raise ValueError(f"must be one of {TIERS}, {LMCACHE}, {NONE}; options of the tiers are given as {TIERS}")
    return layered.choice(TIERS, LMCACHE, NONE)(raw)


def _percent(raw: Any) -> float:
    return layered.number(0, high=100)(raw.strip().removesuffix("%") if isinstance(raw, str) else raw)


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Everything vllm-pd is told about one worker. Sizes are GiB (2**30 bytes), times seconds."""

    role: Role = setting(
        help="what this worker does first: prefill, decode or both; any worker can do either",
        env="VLLM_PD_ROLE",
        flag="--role",
        parse=lambda raw: Role(layered.choice(*Role)(raw)),
        default=Role.BOTH,
    )
    store: str = setting(
        help="URL of the Redis-compatible store where the worker registers; without it no router finds it by itself",
        env="VLLM_PD_STORE",
        flag="--pd-store",
        parse=parsers.store_url,
        default="",
    )
    namespace: str = setting(
        help="name that separates clusters sharing one store",
        env="VLLM_PD_NAMESPACE",
        flag="--pd-namespace",
        parse=parsers.namespace,
        default="default",
    )
    advertise_url: str = setting(
        help="base URL under which routers reach this server; found from --host and --port if not given",
        env="VLLM_PD_ADVERTISE_URL",
        flag="--pd-advertise-url",
        parse=parsers.base_url,
        default="",
    )
    offload: str = setting(
        help="what keeps KV blocks that leave the GPU: tiers (host memory and SSD, as large as --pd-cpu-gib and "
        "--pd-ssd-gib say), lmcache (an LMCache server, see --pd-lmcache-url) or none",
        env="VLLM_PD_OFFLOAD",
        flag="--pd-offload",
        parse=_offload,
        default=TIERS,
    )
    cpu_gib: float = setting(
        help="GiB of host memory for KV blocks evicted from the GPU; 0 turns the CPU tier off",
        env="VLLM_PD_CPU_GIB",
        flag="--pd-cpu-gib",
        parse=layered.number(0, high=1 << 20),
        default=0.0,
    )
    cpu_percent: float = setting(
        help="the same as a percentage of the memory that this host, or its container, has; instead of --pd-cpu-gib",
        env="VLLM_PD_CPU_PERCENT",
        flag="--pd-cpu-percent",
        parse=_percent,
        default=0.0,
    )
    eviction: str = setting(
        help=f"which blocks leave a full CPU tier: {', '.join(EVICTIONS)}; lru and arc are vLLM's own",
        env="VLLM_PD_EVICTION",
        flag="--pd-eviction",
        parse=layered.choice(*EVICTIONS),
        default=DEFAULT_EVICTION,
    )
    ssd_path: str = setting(
        help="folder on an SSD for KV blocks evicted from host memory; needs --pd-cpu-gib and --pd-ssd-gib",
        env="VLLM_PD_SSD_PATH",
        flag="--pd-ssd-path",
        parse=layered.text,
        default="",
    )
    ssd_gib: float = setting(
        help="GiB that the SSD tier may use",
        env="VLLM_PD_SSD_GIB",
        flag="--pd-ssd-gib",
        parse=layered.number(0, high=1 << 30),
        default=0.0,
    )
    ssd_writes_per_day: float = setting(
        help="how many times its size the SSD tier may write in a day before blocks seen for the first time are left "
        "out, which spares the drive; 0 writes only what comes again",
        env="VLLM_PD_SSD_WRITES_PER_DAY",
        flag="--pd-ssd-writes-per-day",
        parse=layered.number(0, high=1e6),
        default=DEFAULT_WRITES_PER_DAY,
    )
    load_gate: LoadGate = setting(
        help="auto: a prompt's blocks are loaded from the tiers where that is expected to beat computing them; "
        "always, never: whatever it costs, or not at all",
        env="VLLM_PD_LOAD_GATE",
        flag="--pd-load-gate",
        parse=lambda raw: LoadGate(layered.choice(*LoadGate)(raw)),
        default=LoadGate.AUTO,
    )
    lmcache_url: str = setting(
        help="LMCache server that --pd-offload lmcache uses",
        env="VLLM_PD_LMCACHE_URL",
        flag="--pd-lmcache-url",
        parse=lmcache_options.url,
        default=lmcache_options.DEFAULT_URL,
    )
    lease_s: float = setting(
        help="seconds after which a worker that died is forgotten",
        env="VLLM_PD_LEASE_S",
        flag="--pd-lease-s",
        parse=layered.number(1, high=3600),
        default=DEFAULT_LEASE_S,
    )
    prefill_budget_tokens: int = setting(
        help="prompt tokens of queued prefill jobs that the worker holds at a time; 0: twice --max-num-batched-tokens "
        "for each data-parallel rank",
        env="VLLM_PD_PREFILL_BUDGET_TOKENS",
        flag="--pd-prefill-budget-tokens",
        parse=layered.integer(0, high=1 << 30),
        default=0,
    )
    nixl: Mapping[str, Any] = setting(
        help="options passed to vLLM's NIXL connector as they are (file and JSON only)", parse=_options, default=dict
    )
    tiers: Mapping[str, Any] = setting(
        help="options passed to vLLM's offloading connector as they are (file and JSON only)",
        parse=_options,
        default=dict,
    )
    lmcache: Mapping[str, Any] = setting(
        help="options of LMCache's connector, for example mq_timeout (file and JSON only)",
        parse=lmcache_options.options,
        default=dict,
    )

    @property
    def has_tiers(self) -> bool:
        """Whether tiers of ours below GPU memory are configured."""
        return self.offload == TIERS and (self.cpu_gib > 0 or self.cpu_percent > 0)

    @property
    def cpu_bytes(self) -> int:
        return int(self.cpu_gib * GIB)

    def sized_for(self, host_bytes: int) -> WorkerSettings:
        """These settings with `cpu_percent` turned into GiB, for a host with so much memory.

        Done once, where the server is started: its processes must agree, and may see different limits.
        """
        if not self.cpu_percent:
            return self
        return replace(self, cpu_gib=round(host_bytes * self.cpu_percent / 100 / GIB, 3), cpu_percent=0.0)

    def to_extra_config(self) -> dict[str, Any]:
        """The `kv_connector_extra_config` that `from_extra_config` turns back into an equal object."""
        defaults = WorkerSettings()
        return {
            name: str(value) if isinstance(value, StrEnum) else dict(value) if isinstance(value, Mapping) else value
            for name in layered.settings_of(WorkerSettings)
            if (value := getattr(self, name)) not in ("", {}, 0.0) or value != getattr(defaults, name)
        }


def load_worker_settings(
    *,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    file: Mapping[str, Any] | None = None,
    file_name: str = "the settings file",
) -> Resolved[WorkerSettings]:
    """Merge the layers and check that the settings fit together.

    Raises:
        SettingsError: one sentence that says what to change.
    """
    resolved = layered.resolve(WorkerSettings, flags=flags, environ=environ, file=file, file_name=file_name)
    check(resolved.value)
    return resolved


def check(settings: WorkerSettings) -> None:
    """Refuse combinations that cannot work.

    Raises:
        SettingsError: one sentence that says what to change.
    """
    if settings.ssd_gib and not settings.ssd_path:
        raise SettingsError("--pd-ssd-gib has no folder to write to; add --pd-ssd-path or drop --pd-ssd-gib.")
    if settings.ssd_path and not settings.ssd_gib:
        raise SettingsError("--pd-ssd-path has no size; add --pd-ssd-gib with the GiB it may use.")
    if settings.ssd_writes_per_day != DEFAULT_WRITES_PER_DAY and not settings.ssd_path:
        raise SettingsError("--pd-ssd-writes-per-day is about an SSD tier, and there is none; add --pd-ssd-path.")
    if "ssd" in settings.tiers and not settings.ssd_path:
        raise SettingsError("tiers.ssd has options of an SSD tier, and there is none; add --pd-ssd-path.")
    if settings.cpu_gib and settings.cpu_percent:
        raise SettingsError("--pd-cpu-gib and --pd-cpu-percent both size the CPU tier; drop one of them.")
    cpu_tier = settings.cpu_gib or settings.cpu_percent
    if settings.ssd_path and not cpu_tier:
        raise SettingsError("--pd-ssd-path needs a CPU tier above it; add --pd-cpu-gib or --pd-cpu-percent.")
    overlap = {"kv_connector", "engine_id", "kv_role", "load_gate"} & (set(settings.nixl) | set(settings.tiers))
    if overlap:
        raise SettingsError(f"nixl and tiers options cannot set {', '.join(sorted(overlap))}; remove it.")
    _check_offload(settings)


def _check_offload(settings: WorkerSettings) -> None:
    """One system keeps the blocks, and what is said about another one is a mistake."""
    tiers = settings.cpu_gib or settings.cpu_percent or settings.ssd_path or settings.ssd_gib
    if settings.offload == LMCACHE and (tiers or settings.tiers):
        raise SettingsError(
            "--pd-offload lmcache takes the place of the tiers, which would keep every block a second time; drop "
            "--pd-cpu-gib, --pd-cpu-percent, --pd-ssd-path, --pd-ssd-gib and tiers, or use --pd-offload tiers."
        )
    if settings.offload == NONE and tiers:
        raise SettingsError("--pd-offload none and the size of a tier contradict each other; drop one of them.")
    if settings.offload != TIERS and (settings.eviction != DEFAULT_EVICTION or settings.load_gate is not LoadGate.AUTO):
        raise SettingsError(
            f"--pd-eviction and --pd-load-gate are about the tiers, which --pd-offload {settings.offload} turns off; "
            "drop them."
        )
    if settings.offload != LMCACHE and (settings.lmcache or settings.lmcache_url != lmcache_options.DEFAULT_URL):
        raise SettingsError("An LMCache server is named, but nothing uses it; add --pd-offload lmcache or drop it.")


KV_ROLES = {"kv_producer": Role.PREFILL, "kv_consumer": Role.DECODE, "kv_both": Role.BOTH}
"""vLLM's names for the roles."""


def json_layer(extra: Mapping[str, Any], kv_role: str | None) -> dict[str, Any]:
    """The settings in `kv_connector_extra_config`, by field name.

    Args:
        kv_role: vLLM's own role field; unless it is `kv_both`, it names the role when `extra` does not.

    Raises:
        SettingsError: unknown key.
    """
    known = list(layered.settings_of(WorkerSettings))
    data = layered.check_keys(extra, known, "kv_connector_extra_config")
    if kv_role in KV_ROLES and kv_role != "kv_both":
        data.setdefault("role", KV_ROLES[kv_role])
    return data


def from_extra_config(extra: Mapping[str, Any], *, kv_role: str | None = None) -> WorkerSettings:
    """Settings given as JSON in `--kv-transfer-config`; see `json_layer`.

    Raises:
        SettingsError: unknown key, bad value or bad combination.
    """
    return load_worker_settings(file=json_layer(extra, kv_role), file_name="kv_connector_extra_config").value

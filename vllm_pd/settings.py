"""Settings of a worker: what `vllm serve --kv-connector pd` can be told, by flag, environment, file or JSON.

The same field names are used everywhere: flag `--pd-cpu-gib`, variable `VLLM_PD_CPU_GIB`, key `cpu_gib` of the YAML
file and of `kv_connector_extra_config`. Imports neither vllm nor torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from vllm_pd import layered
from vllm_pd.errors import SettingsError
from vllm_pd.layered import Resolved, setting
from vllm_pd.state.base import Role

CONNECTOR = "pd"
"""Name under which our connector is registered with vLLM."""

STORE_SCHEMES = ("redis", "rediss", "unix")
DEFAULT_LEASE_S = 10.0
GIB = 1 << 30

_NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


def _store_url(raw: Any) -> str:
    url = layered.text(raw)
    if urlsplit(url).scheme not in STORE_SCHEMES:
        raise ValueError(
            f"must be a URL with one of the schemes {', '.join(STORE_SCHEMES)} (for example redis://host:6379), "
            f"got {layered.redact(url)!r}"
        )
    return layered.SecretUrl(url)


def _namespace(raw: Any) -> str:
    name = layered.text(raw)
    if not _NAMESPACE.fullmatch(name):
        raise ValueError(f"must be 1 to 64 letters, digits, dots, dashes or underscores, got {name!r}")
    return name


def _advertise_url(raw: Any) -> str:
    url = layered.text(raw).rstrip("/")
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and not (parts.query or parts.fragment)
        # Routers, logs and metrics show it to everybody.
        valid = valid and "@" not in parts.netloc
        _ = parts.port
    except ValueError:
        valid = False
    if not valid:
        raise ValueError(f"must be http://HOST:PORT or https://HOST:PORT without a user, got {layered.redact(url)!r}")
    return url


def _options(raw: Any) -> dict[str, Any]:
    if not isinstance(raw, Mapping):
        raise ValueError(f"must be a mapping of option names to values, got {raw!r}")
    return dict(raw)


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
        parse=_store_url,
        default="",
    )
    namespace: str = setting(
        help="name that separates clusters sharing one store",
        env="VLLM_PD_NAMESPACE",
        flag="--pd-namespace",
        parse=_namespace,
        default="default",
    )
    advertise_url: str = setting(
        help="base URL under which routers reach this server; found from --host and --port if not given",
        env="VLLM_PD_ADVERTISE_URL",
        flag="--pd-advertise-url",
        parse=_advertise_url,
        default="",
    )
    cpu_gib: float = setting(
        help="GiB of host memory for KV blocks evicted from the GPU; 0 turns the CPU tier off",
        env="VLLM_PD_CPU_GIB",
        flag="--pd-cpu-gib",
        parse=layered.number(0, high=1 << 20),
        default=0.0,
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
    lease_s: float = setting(
        help="seconds after which a worker that died is forgotten",
        env="VLLM_PD_LEASE_S",
        flag="--pd-lease-s",
        parse=layered.number(1, high=3600),
        default=DEFAULT_LEASE_S,
    )
    nixl: Mapping[str, Any] = setting(
        help="options passed to vLLM's NIXL connector as they are (file and JSON only)", parse=_options, default=dict
    )
    offload: Mapping[str, Any] = setting(
        help="options passed to vLLM's offloading connector as they are (file and JSON only)",
        parse=_options,
        default=dict,
    )

    @property
    def has_tiers(self) -> bool:
        """Whether anything below GPU memory is configured."""
        return self.cpu_gib > 0

    @property
    def cpu_bytes(self) -> int:
        return int(self.cpu_gib * GIB)

    def to_extra_config(self) -> dict[str, Any]:
        """The `kv_connector_extra_config` that `from_extra_config` turns back into an equal object."""
        return {
            name: str(value) if isinstance(value, Role) else dict(value) if isinstance(value, Mapping) else value
            for name in layered.settings_of(WorkerSettings)
            if (value := getattr(self, name)) not in ("", {}, 0.0)
        }


def read_file(path: str) -> dict[str, Any]:
    """Read a YAML settings file.

    Raises:
        SettingsError: it cannot be read, is not YAML, or is not a mapping.
    """
    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as e:
        raise SettingsError(f"The settings file {path} cannot be read ({e.strerror}); check --pd-config.") from None
    except (yaml.YAMLError, ValueError) as e:
        # ValueError: bytes that are no UTF-8.
        detail = " ".join(str(e).split())
        raise SettingsError(f"The settings file {path} is not valid YAML: {detail}.") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise SettingsError(f"The settings file {path} must hold keys and values such as 'role: prefill'.")
    return data


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
    if settings.ssd_path and not settings.cpu_gib:
        raise SettingsError("--pd-ssd-path needs a CPU tier above it; add --pd-cpu-gib.")
    overlap = {"kv_connector", "engine_id", "kv_role"} & (set(settings.nixl) | set(settings.offload))
    if overlap:
        raise SettingsError(f"nixl and offload options cannot set {', '.join(sorted(overlap))}; remove it.")


def from_extra_config(extra: Mapping[str, Any], *, kv_role: str | None = None) -> WorkerSettings:
    """Settings given as JSON in `--kv-transfer-config`.

    Args:
        extra: `kv_connector_extra_config`; same keys as the file.
        kv_role: vLLM's own role field, used when `role` is not among the keys.

    Raises:
        SettingsError: unknown key, bad value or bad combination.
    """
    data = dict(extra)
    if "role" not in {layered.normalise_key(str(k)) for k in data} and kv_role in KV_ROLES:
        data["role"] = str(KV_ROLES[kv_role])
    return load_worker_settings(file=data, file_name="kv_connector_extra_config").value


KV_ROLES = {"kv_producer": Role.PREFILL, "kv_consumer": Role.DECODE, "kv_both": Role.BOTH}
"""vLLM's names for the roles."""

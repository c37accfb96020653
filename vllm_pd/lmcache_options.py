"""What `--pd-offload lmcache` can be told, and what LMCache's connector makes of it. Imports neither vllm nor lmcache.

Only LMCache's multi-process mode is composed: its in-process connector (LMCacheConnectorV1) has no CPU path and then
serves without a cache, and says so nowhere.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from vllm_pd import layered
from vllm_pd.errors import SettingsError

CONNECTOR = "PDLMCacheConnector"
"""Name under which our subclass of LMCache's connector is registered with vLLM."""
TESTED = "0.5.6"
DEFAULT_URL = "tcp://localhost:5555"

PREFIX = "lmcache.mp."
"""Of LMCache's own names of its options."""

DEFAULTS: Mapping[str, Any] = {
    # LMCache's own are 300 s and 10 s: so long would a request wait, and on a CPU the whole engine, for a server that
    # hangs. Three missed heartbeats must fit into the 30 s after which the server forgets a worker.
    "mq_timeout": 5.0,
    "heartbeat_interval": 2.0,
    # The worker copies. LMCache's own default with CUDA is that its server writes into GPU memory, and one that is
    # taken for dead while it does so may write into blocks that another request has got by then.
    "mp_transfer_mode": "engine_driven",
}
_OPTIONS = (
    "mq_timeout", "heartbeat_interval", "nonblocking_lookup_status", "mp_transfer_mode", "isolated_ipc", "use_vmm_api",
    "save_decode_cache", "eager_prefetch",
)  # fmt: skip
_NOT_OURS = {
    "host": "the server is named by --pd-lmcache-url",
    "port": "the server is named by --pd-lmcache-url",
    "server_urls": "the server is named by --pd-lmcache-url",
    "autostart": "a server that a worker starts ends with it, and its cache too; start `lmcache server` by itself",
    "lazy_offload": "it stores blocks after vLLM has let go of them, which was not tested beside hand-offs",
    "transfer_intermediate_tensors": "it is experimental in LMCache",
    "hash_algorithm": "it only matters for LMCache's KV events, which are off here",
}
_TIMES = ("mq_timeout", "heartbeat_interval")
_SCHEMES = ("tcp", "grpc")

_CPU_PACKAGES = (
    "aiofile", "aiofiles", "awscrt", "caio", "nvtx", "opentelemetry-exporter-prometheus", "sortedcontainers",
)  # fmt: skip
INSTALL = f"pip install --no-deps lmcache=={TESTED} {' '.join(_CPU_PACKAGES)}"
"""Outside CUDA. Without --no-deps pip takes CUDA packages of several GB and older versions of what vLLM needs."""
SERVER = (
    "lmcache server --host localhost --port 5555 --l1-size-gb 8 --eviction-policy LRU "
    "--supported-transfer-mode auto --shm-name NAME"
)


def url(raw: Any) -> str:
    """`tcp://HOST:PORT` of an LMCache server; the scheme may be left out.

    Raises:
        ValueError: a phrase that completes "NAME ...".
    """
    text = layered.text(raw)
    whole = text if "://" in text else f"tcp://{text}"
    try:
        parts = urlsplit(whole)
        valid = parts.scheme in _SCHEMES and bool(parts.hostname) and parts.port is not None
        valid = valid and not (parts.path or parts.query or parts.fragment or "@" in parts.netloc)
    except ValueError:
        valid = False
    if not valid:
        raise ValueError(f"must be tcp://HOST:PORT of an LMCache server, got {layered.redact(text)!r}")
    return whole


def options(raw: Any) -> dict[str, Any]:
    """LMCache's options by their short names (`mq_timeout` for `lmcache.mp.mq_timeout`).

    Raises:
        ValueError: a phrase that completes "NAME ...".
    """
    if not isinstance(raw, Mapping):
        raise ValueError(f"must be a mapping of option names to values, got {raw!r}")
    found: dict[str, Any] = {}
    for key, value in raw.items():
        name = str(key).removeprefix(PREFIX)
        if name in _NOT_OURS:
            raise ValueError(f"cannot set {key}: {_NOT_OURS[name]}")
        if name == "connector":
            raise ValueError(
                "cannot choose another connector: LMCacheConnectorV1 has no CPU path and serves on without a cache, "
                "so only LMCache's multi-process mode is composed"
            )
        if name not in _OPTIONS:
            raise ValueError(
                f"has the unknown key {key!r}{layered.nearest(name, list(_OPTIONS))}; "
                f"known keys are {', '.join(_OPTIONS)}"
            )
        if name in _TIMES:
            try:
                value = layered.number(0, exclusive=True, high=3600)(value)
            except ValueError as e:
                raise ValueError(f"has {key}, which {e}") from None
        found[name] = value
    return found


def connector_options(server_url: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """`kv_connector_extra_config` of LMCache's connector."""
    scheme, _, address = server_url.partition("://")
    host, _, port = address.rpartition(":")
    named = {PREFIX + name: value for name, value in {**DEFAULTS, **given}.items()}
    return {f"{PREFIX}host": f"{scheme}://{host}", f"{PREFIX}port": int(port), **named}


def check_installed() -> None:
    """Whether LMCache is there.

    Raises:
        SettingsError: it is not; the message says how it is installed.
    """
    if importlib.util.find_spec("lmcache") is None:
        raise SettingsError(
            f"--pd-offload lmcache needs the package lmcache, which is not installed; with CUDA, pip install "
            f"'vllm-pd[lmcache]'; elsewhere, {INSTALL} (without --no-deps pip would add CUDA packages and replace some "
            "that vLLM needs)."
        )


def version() -> str:
    """Version of the installed LMCache; empty without one."""
    try:
        return importlib.metadata.version("lmcache")
    except importlib.metadata.PackageNotFoundError:
        return ""

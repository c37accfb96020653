"""Who this worker is: URL, id, epoch, pool. No I/O but a look at the routing table."""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from vllm_pd import parsers
from vllm_pd.errors import SettingsError
from vllm_pd.state.base import Epoch, PoolSpec, WorkerId

_WILDCARDS = ("", "0.0.0.0", "::")
_DEFAULT_PORTS = {"http": 80, "https": 443}
# Addresses reserved for documentation: connecting a UDP socket picks a source address and sends nothing.
_PROBES = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))


def local_ip() -> str:
    """An address of this machine that others can route to, or 127.0.0.1. Sends no packet."""
    for family, target in _PROBES:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as s:
                s.connect((target, 9))
                address = str(s.getsockname()[0])
        except OSError:
            continue
        if not ipaddress.ip_address(address).is_unspecified:
            return address
    return "127.0.0.1"


def own_ip(environ: Mapping[str, str]) -> str:
    """The address at which other hosts reach this machine: vLLM's own variable for it, else what `local_ip` finds."""
    return environ.get("VLLM_HOST_IP") or local_ip()


def advertise_url(
    host: str | None, port: int, *, uds: str | None = None, tls: bool = False, explicit: str = "", host_ip: str = ""
) -> str:
    """Base URL under which routers reach this server, without a trailing slash.

    Args:
        host, port, uds: what the server binds.
        explicit: wins over everything; must be an http or https URL.
        host_ip: address to advertise when the server binds every interface; found if empty.

    Raises:
        SettingsError: `explicit` is malformed, or nothing can be derived from what the server binds.
    """
    if explicit:
        try:
            return parsers.base_url(explicit)
        except ValueError as e:
            raise SettingsError(f"--pd-advertise-url {e}.") from None
    if uds:
        raise SettingsError("A server on a Unix socket has no URL of its own; set --pd-advertise-url.")
    if not port:
        raise SettingsError("A server on port 0 has no known URL; set --port, or --pd-advertise-url.")
    name = (host or "").strip("[]")
    if name in _WILDCARDS:
        name = host_ip or local_ip()
    return f"{'https' if tls else 'http'}://{f'[{name}]' if ':' in name else name}:{port}"


def worker_id(url: str) -> WorkerId:
    """`host:port` of a base URL, plus its path if it has one (several workers behind one gateway)."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    host = f"[{host}]" if ":" in host else host
    return WorkerId(f"{host}:{parts.port or _DEFAULT_PORTS.get(parts.scheme, 0)}{parts.path.rstrip('/')}")


def new_epoch() -> Epoch:
    """The epoch of a worker that starts now."""
    return Epoch(time.time_ns() // 1_000_000)


def pool_spec(vllm_config: Any, vllm_version: str, hash_seed: str = "") -> PoolSpec:
    """What must be equal for two workers to share KV, read from a started engine's `VllmConfig`.

    The block size is that of the hashes: with decode context parallelism a block is spread over its ranks.

    The memory layout is often chosen inside the worker processes ("auto" here): with everything else equal, so is
    the choice, on one kind of device.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    dtype = str(model.dtype).removeprefix("torch.")
    kv_dtype = str(cache.cache_dtype)
    layout = getattr(cache, "kv_cache_layout", None) or "auto"
    return PoolSpec(
        model=str(model.model),
        revision=str(model.revision or "main"),
        dtype=dtype,
        kv_dtype=dtype if kv_dtype == "auto" else kv_dtype,
        kv_layout=f"{vllm_config.device_config.device_type}/{layout}",
        block_size=int(cache.block_size) * int(vllm_config.parallel_config.decode_context_parallel_size),
        hash_algo=str(cache.prefix_caching_hash_algo),
        engine=vllm_version,
        hash_seed=hash_seed,
    )

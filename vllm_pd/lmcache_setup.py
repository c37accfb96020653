"""What must hold before an engine is started with LMCache: asked in the process that the user started."""

from __future__ import annotations

import logging
import socket
import time
from typing import Any

from vllm_pd import lmcache_options
from vllm_pd.errors import SettingsError

logger = logging.getLogger("vllm.vllm_pd")

WAIT_S = 10.0
"""A server that is started together with the worker may need a moment."""
_TRY_S = 2.0
_PAUSE_S = 0.25


def check(server_url: str, engine_args: Any, *, wait_s: float = WAIT_S) -> None:
    """Refuse what LMCache's connector does not support, and a server that is not there.

    Raises:
        SettingsError: one sentence that says what to change.
    """
    lmcache_options.check_installed()
    if (found := lmcache_options.version()) != lmcache_options.TESTED:
        logger.warning(
            "vllm-pd is tested with LMCache %s and this is %s; it may fail in ways its tests do not show.",
            lmcache_options.TESTED,
            found or "of no known version",
        )
    if getattr(engine_args, "enable_sleep_mode", False):
        raise SettingsError(
            "--enable-sleep-mode takes away the KV cache that an LMCache server has been given access to; drop it, or "
            "use --pd-offload tiers."
        )
    wait_for_server(server_url, wait_s)


def wait_for_server(server_url: str, wait_s: float = WAIT_S) -> None:
    """Return when something listens at the address: LMCache itself would wait for minutes, and then say less.

    Raises:
        SettingsError: nothing did within the time.
    """
    host, _, port = server_url.partition("://")[2].rpartition(":")
    deadline = time.monotonic() + wait_s
    while True:
        left = max(0.05, min(_TRY_S, deadline - time.monotonic()))
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=left).close()
            return
        except OSError as e:
            why = e.strerror or str(e)
        if time.monotonic() >= deadline:
            raise SettingsError(
                f"No LMCache server answers at {server_url} ({why}); start one, for example with "
                f"{lmcache_options.SERVER!r}, or name another with --pd-lmcache-url."
            )
        time.sleep(_PAUSE_S)

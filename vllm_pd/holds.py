"""How a router names the blocks that a prefill worker keeps for it, and how it lets go of them.

A prefill worker keeps the blocks of a finished prefill leg under a lease until a decode worker has read them. The leg's
`kv_transfer_params` name them by a key of the router's own (`HOLD_FIELD`). Blocks that nobody will read are let go by
any small request to that engine whose `kv_transfer_params` list their keys (`RELEASE_FIELD`). Workers without vllm-pd
know neither and do nothing.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

HOLD_FIELD = "pd_hold"
RELEASE_FIELD = "pd_release"
MAX_KEY = 128
"""Characters."""
MAX_KEYS = 256
"""Of one release."""


def new_key() -> str:
    """A key that nobody can guess: whoever knows it can let the blocks go while they are needed."""
    return secrets.token_hex(16)


def hold_key(params: Mapping[str, Any] | None) -> str:
    """The key that a prefill leg names; empty without a usable one."""
    key = (params or {}).get(HOLD_FIELD)
    return key if isinstance(key, str) and len(key) <= MAX_KEY else ""


def released_keys(params: Mapping[str, Any] | None) -> list[str]:
    """The keys that a request lets go; empty for any other request. What is not a key is left out."""
    keys = (params or {}).get(RELEASE_FIELD)
    if not isinstance(keys, list):
        return []
    return [key for key in keys[:MAX_KEYS] if isinstance(key, str) and 0 < len(key) <= MAX_KEY]

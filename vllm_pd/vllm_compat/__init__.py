"""Every vLLM internal that vllm-pd uses, in one place.

vLLM's extension points are stable in name only, so each thing taken from vLLM is listed in `INTERNALS` with the
parameters or members we rely on. The table serves twice: names are imported from here, lazily
(`from vllm_pd.vllm_compat import MultiConnector`), and the contract test checks each entry against an installed vLLM or
against the source of a wheel (`make test-contract VLLM=...`). Nothing is imported from vLLM until it is asked for.
"""

from __future__ import annotations

import importlib
from typing import Any

from vllm_pd.errors import UnsupportedVLLMError
from vllm_pd.vllm_compat.engine import ENGINE
from vllm_pd.vllm_compat.internal import Internal
from vllm_pd.vllm_compat.serving import SERVING
from vllm_pd.vllm_compat.tiers import TIERS
from vllm_pd.vllm_compat.transfer import TRANSFER
from vllm_pd.vllm_compat.version import supported_text, vllm_version

INTERNALS: tuple[Internal, ...] = (*SERVING, *ENGINE, *TRANSFER, *TIERS)

_BY_ALIAS = {entry.alias: entry for entry in INTERNALS}


def __getattr__(alias: str) -> Any:
    """Import the internal named `alias`.

    Raises:
        UnsupportedVLLMError: the installed vLLM does not have it.
    """
    entry = _BY_ALIAS.get(alias)
    if entry is None:
        raise AttributeError(f"module {__name__!r} has no attribute {alias!r}")
    value = _load(entry)
    globals()[alias] = value
    return value


def _load(entry: Internal) -> Any:
    try:
        module = importlib.import_module(entry.module)
        if hasattr(module, entry.name):
            return getattr(module, entry.name)
        return importlib.import_module(f"{entry.module}.{entry.name}")
    except ModuleNotFoundError as e:
        if e.name and not e.name.startswith("vllm"):
            raise
    raise UnsupportedVLLMError(
        f"vLLM {vllm_version() or '(not installed)'} has no {entry.module}.{entry.name}, which vllm-pd needs "
        f"({entry.why}); install vLLM {supported_text()}."
    )

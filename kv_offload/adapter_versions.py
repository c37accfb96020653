"""Which weights a LoRA adapter had, for the keys of blocks on the SSD.

vLLM's block hash has an adapter's name and path in it. Within a server that is nearly enough; files outlive it, and the
next server may find other weights under the same path.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from pathlib import Path
from typing import Protocol

from vllm_pd.kv_offload.ssd_namespace import fingerprint

VERSION_BYTES = 9
"""Behind a key. vLLM's keys are whole words of 4 bytes, so that the two can be told apart."""
_WORD = 4
_REMEMBERED = 4096


class Adapter(Protocol):
    """vLLM's LoRARequest, as far as needed here."""

    @property
    def lora_int_id(self) -> int: ...
    @property
    def lora_path(self) -> str: ...
    @property
    def load_inplace(self) -> bool: ...


class AdapterVersions:
    """By adapter, found out when a request first names it: that is when the engine loads it."""

    def __init__(self) -> None:
        self._versions: OrderedDict[tuple[int, str], bytes] = OrderedDict()

    def of(self, adapter: Adapter) -> bytes:
        """`VERSION_BYTES` that change with the adapter's files, which are looked at when it is new or loaded anew."""
        known = adapter.lora_int_id, adapter.lora_path
        if known not in self._versions or adapter.load_inplace:
            files = json.dumps(fingerprint(Path(adapter.lora_path))).encode()
            self._versions[known] = hashlib.sha256(files).digest()[:VERSION_BYTES]
            if len(self._versions) > _REMEMBERED:
                self._versions.popitem(last=False)
        return self._versions[known]


def without_version(key: bytes) -> bytes:
    """vLLM's key of a stored block."""
    return key[:-VERSION_BYTES] if len(key) % _WORD else key

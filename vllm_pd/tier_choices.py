"""What the settings of the tiers can be, by name, apart from what does it: every vLLM process reads the settings."""

from __future__ import annotations

from enum import StrEnum

EVICTIONS = ("lru", "arc", "s3fifo", "sieve", "wtinylfu", "adaptive")
"""Who can evict from the CPU tier, see `kv_offload/policies`."""
DEFAULT_EVICTION = "adaptive"

DEFAULT_WRITES_PER_DAY = 1.0
"""How many times its size the SSD tier may write in a day, see `kv_offload/admission.py`."""


class LoadGate(StrEnum):
    """Whether the cost gate decides, or everything or nothing is loaded whatever it costs."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"

"""Block hashes as vLLM computes them, without vLLM."""

from __future__ import annotations

KEY_BYTES = 15
"""Bytes of a block hash that the index keeps: 120 bits. One more would cost 16: a bytes object of 15 takes 48 bytes."""

BlockKey = bytes
"""The first `KEY_BYTES` bytes of a block hash."""

"""Under which keys a request's blocks are in LMCache, and which requests stay out of it. Pure.

LMCache keys a chunk of tokens by the model's name, the parallel shape, the tokens and a salt. What else changes the
bytes of a block (revision, dtype, layout, ...) is not in it: two servers of one model's name would read each other's.
So the salt carries it, together with the request's own. A salt made here is also always one that LMCache accepts: it
raises inside the scheduler for one that is long or has a slash, which a client may send.

What LMCache does not tell apart at all stays out: adapters (it drops the LoRA id), prompts given as embeddings (their
tokens are all zero), and media that stand for so few tokens that what LMCache keeps of their hash is short. Neither is
its record of a request made for one whose prompt changes.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Any

LORA = "a LoRA adapter is not part of LMCache's keys"
EMBEDDINGS = "a prompt given as embeddings has no tokens that tell it from others"
SHORT_MEDIA = "media of so few tokens are told apart by too few bits in LMCache's keys"

GROWING = "the input of this request goes on while it is served"

_MEDIA_TOKENS = 8
"""LMCache puts 31 bits of a hash of the item into each of its placeholder tokens."""


class KeySpace:
    """Of one engine.

    Args:
        identity: digest of all that changes the bytes of a block but is not in LMCache's keys.
    """

    def __init__(self, identity: str) -> None:
        self._identity = identity

    def renewed(self) -> KeySpace:
        """Another one, that nothing is stored under: the engine's blocks are no longer what its identity says."""
        return KeySpace(f"{self._identity} {secrets.token_hex(16)}")

    def salt(self, cache_salt: str | None) -> str:
        """The salt that LMCache gets for a request that came with `cache_salt`: 64 hex digits."""
        text = self._identity + ("" if not cache_salt else f"\n{cache_salt}")
        return hashlib.sha256(text.encode()).hexdigest()


def why_not(request: Any) -> str:
    """Why the blocks of this request may not go through LMCache; empty when they may.

    Args:
        request: vLLM's, of which `lora_request`, `prompt_embeds`, `mm_features`, `resumable` are read.
    """
    if request.lora_request is not None:
        return LORA
    if request.prompt_embeds is not None:
        return EMBEDDINGS
    if any(item.mm_position.length < _MEDIA_TOKENS for item in request.mm_features or ()):
        return SHORT_MEDIA
    if request.resumable:
        return GROWING
    return ""

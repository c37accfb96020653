"""Requests whose blocks differ never share a key in LMCache, and those that it would mix up stay out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_pd.connectors import lmcache_keys
from vllm_pd.connectors.lmcache_keys import KeySpace, why_not


def request(**changes: Any) -> SimpleNamespace:
    plain = {"lora_request": None, "prompt_embeds": None, "mm_features": [], "resumable": False}
    return SimpleNamespace(**{**plain, **changes})


def media(*tokens: int) -> list[SimpleNamespace]:
    return [SimpleNamespace(identifier=f"hash{n}", mm_position=SimpleNamespace(length=n)) for n in tokens]


def test_engines_and_salts_that_differ_never_share_a_key() -> None:
    salts = ["", "a", "b", "a\n", "\na", "A"]
    made = [KeySpace(identity * 64).salt(salt) for identity in ("0", "1") for salt in salts]
    assert len(set(made)) == len(made)
    assert KeySpace("0" * 64).salt(None) == made[0], "no salt and an empty one are the same, as in vLLM"


@pytest.mark.parametrize("salt", ["a/b", "x" * 4000, "a@b\\c", "\0", "ü🙂", None])
def test_every_salt_becomes_one_that_lmcache_accepts(salt: str | None) -> None:
    made = KeySpace("engine").salt(salt)
    assert len(made) == 64 and set(made) <= set("0123456789abcdef")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"mm_features": media(8, 576)}, ""),
        ({"lora_request": object()}, lmcache_keys.LORA),
        ({"prompt_embeds": object()}, lmcache_keys.EMBEDDINGS),
        ({"mm_features": media(576, 1)}, lmcache_keys.SHORT_MEDIA),
        ({"resumable": True}, lmcache_keys.GROWING),
    ],
)
def test_what_lmcache_does_not_tell_apart_stays_out(changes: dict[str, Any], reason: str) -> None:
    assert why_not(request(**changes)) == reason

"""Request traces in Mooncake's format, and made-up ones."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_pd.block_hash import KEY_BYTES, BlockKey
from vllm_pd.errors import SettingsError

HASH_TOKENS = 512
"""Tokens that one entry of `hash_ids` stands for, in the traces that Mooncake published."""

SOURCE = "https://github.com/kvcache-ai/Mooncake (FAST25-release/traces)"


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace."""

    at: float
    """Seconds after the first request."""
    prompt: int
    output: int
    keys: tuple[BlockKey, ...]
    """Of the prompt's whole blocks; equal keys mean equal content from the beginning of the prompt."""


def read_trace(
    path: Path, *, limit: int | None = None, block_size: int = HASH_TOKENS, hash_tokens: int = HASH_TOKENS
) -> list[TraceRequest]:
    """Read JSON lines of `timestamp` (ms), `input_length`, `output_length`, `hash_ids`.

    Args:
        path: the file.
        limit: at most so many requests, from the beginning.
        block_size: tokens of the blocks to make; must divide `hash_tokens`.
        hash_tokens: tokens per hash id.

    Raises:
        SettingsError: the file cannot be read, or a line is not such a request; names the line.
    """
    if hash_tokens % block_size or block_size < 1:
        raise SettingsError(f"The block size {block_size} must divide the {hash_tokens} tokens of a hash id.")
    keys = _Keys(hash_tokens // block_size)
    requests: list[TraceRequest] = []
    first = last = 0.0
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if limit is not None and len(requests) >= limit:
                    break
                if not line.strip():
                    continue
                at, prompt, output, ids = _parse(line, f"{path}, line {number}")
                whole = prompt // hash_tokens
                if len(ids) < whole:
                    raise SettingsError(
                        f"{path}, line {number}: {len(ids)} hash_ids cannot cover {prompt} tokens; "
                        f"{hash_tokens} tokens a hash id need {whole} or one more (see --hash-tokens)."
                    )
                if not requests:
                    first = last = at
                if at < last:
                    raise SettingsError(f"{path}, line {number}: the timestamp is smaller than the one before it.")
                last = at
                made = keys.of(ids, prompt // block_size)
                requests.append(TraceRequest((at - first) / 1000, prompt, output, made))
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "it is not UTF-8 text"
        raise SettingsError(f"The trace {path} cannot be read: {reason}. Public traces: {SOURCE}.") from None
    if not requests:
        raise SettingsError(f"The trace {path} holds no request.")
    return requests


def _parse(line: str, where: str) -> tuple[float, int, int, Sequence[int]]:
    try:
        fields = json.loads(line)
    except ValueError:
        raise SettingsError(f"{where}: not a JSON object.") from None
    if not isinstance(fields, dict):
        raise SettingsError(f"{where}: not a JSON object.")
    values: list[float] = []
    for name, least in (("timestamp", 0), ("input_length", 1), ("output_length", 0)):
        value = fields.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < least:
            raise SettingsError(f"{where}: {name} must be a number of at least {least}.")
        values.append(value)
    ids = fields.get("hash_ids")
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        raise SettingsError(f"{where}: hash_ids must be a list of integers.")
    return values[0], int(values[1]), max(1, int(values[2])), ids


class _Keys:
    """One key per block content with everything before it, the same object each time."""

    def __init__(self, parts: int) -> None:
        self._parts = parts
        self._numbers: dict[tuple[int, int], int] = {}
        self._keys: list[BlockKey] = []

    def of(self, ids: Sequence[int], blocks: int) -> tuple[BlockKey, ...]:
        keys: list[BlockKey] = []
        parent = -1
        for hash_id in ids:
            number = self._numbers.setdefault((parent, hash_id), len(self._numbers))
            if number * self._parts == len(self._keys):
                start = len(self._keys)
                self._keys.extend(made_key(start + i) for i in range(self._parts))
            keys.extend(self._keys[number * self._parts : (number + 1) * self._parts])
            parent = number
        return tuple(keys[:blocks])


def made_key(number: int) -> BlockKey:
    """A block key for made-up content. Spread like a real hash: structures keyed by it must not profit from order."""
    return hashlib.blake2b(number.to_bytes(8), digest_size=KEY_BYTES).digest()


def make_trace(
    *,
    sessions: int,
    turns: int,
    seed: int = 0,
    system_prompts: int = 4,
    system_tokens: int = 2048,
    turn_tokens: int = 1024,
    output: int = 100,
    rate: float = 2.0,
    pause: float = 10.0,
    block_size: int = HASH_TOKENS,
) -> list[TraceRequest]:
    """A made-up trace of conversations that share system prompts.

    Args:
        sessions: conversations; they begin `rate` per second on average.
        turns: requests of each; every prompt continues the one before it.
        seed: equal seeds give equal traces.
        system_prompts: how many different beginnings of `system_tokens` tokens there are.
        system_tokens: length of each.
        turn_tokens: mean length of what a turn adds to the prompt.
        output: mean answer length.
        rate: new conversations per second.
        pause: mean seconds between two turns of one.
        block_size: tokens.
    """
    chance = random.Random(seed)
    numbers = iter(range(1_000_000_000))
    systems = [[made_key(next(numbers)) for _ in range(system_tokens // block_size)] for _ in range(system_prompts)]
    requests: list[TraceRequest] = []
    begins = 0.0
    for _ in range(sessions):
        begins += chance.expovariate(rate)
        at = begins
        tokens = system_tokens
        keys = list(chance.choice(systems))
        for _ in range(turns):
            tokens += max(1, int(chance.expovariate(1 / turn_tokens)))
            keys.extend(made_key(next(numbers)) for _ in range(tokens // block_size - len(keys)))
            requests.append(TraceRequest(at, tokens, max(1, int(chance.expovariate(1 / output))), tuple(keys)))
            at += chance.expovariate(1 / pause)
    requests.sort(key=lambda request: request.at)
    return requests

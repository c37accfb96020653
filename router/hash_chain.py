"""Block keys of prompts that begin alike, computed once.

A prompt comes in pieces (a chat's messages, more or less). Each piece, in its place behind certain other pieces, has
an entry: how many tokens the prompt has up to its end, the keys of the blocks that it completed, the last block's
hash, and the tokens that fill no block yet. Going on from an entry is exact, so the next turn of a conversation costs
a lookup per known piece and the hashing of what is new.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_pd.block_hash import KEY_BYTES, BlockHash, BlockHasher, BlockKey, ExtraKeys
from vllm_pd.router.encoder import TokenIds
from vllm_pd.router.lru import ByteLru

MAX_BYTES = 64 * 1024 * 1024

_ENTRY_BYTES = 700
"""An entry without its piece and its keys, with what the cache needs for it."""
_KEY_BYTES = 56


@dataclass(frozen=True, slots=True)
class Start:
    """What prompts can differ in before their first piece."""

    extra: ExtraKeys | None
    before: bytes = b""
    """Tokens that the tokenizer puts in front, as the bytes of a `TokenIds`."""
    generation: int = 0
    """`Encoder.generation`."""


@dataclass(frozen=True, slots=True)
class _Entry:
    id: int
    tokens: int
    last: BlockHash | None
    rest: TokenIds
    keys: list[BlockKey]


_EntryKey = tuple[Start | int, str]
"""The entry before it, or the start, and the piece."""


class HashChain:
    """The chains of one pool. Safe to call from several threads: only looking up and keeping needs the lock."""

    def __init__(self, hasher: BlockHasher, max_bytes: int = MAX_BYTES) -> None:
        self._hasher = hasher
        self._entries: ByteLru[_EntryKey, _Entry] = ByteLru(max_bytes)
        self._ids = itertools.count()
        self._lock = threading.Lock()

    def keys(
        self, start: Start, pieces: Sequence[str], ids_of: Callable[[int], TokenIds], after: TokenIds | None = None
    ) -> tuple[int, list[BlockKey]]:
        """Number of tokens and the keys of all whole blocks.

        Args:
            pieces: equal ones behind equal ones, or behind an equal start, must have equal tokens.
            ids_of: the tokens of the piece at an index.
            after: tokens that follow the last piece.
        """
        entry: _Entry | None = None
        keys: list[BlockKey] = []
        path: list[_EntryKey] = []
        with self._lock:
            get = self._entries.get
            for piece in pieces:
                key = (start if entry is None else entry.id, piece)
                found = get(key)
                if found is None:
                    break
                entry = found
                keys += entry.keys
                path.append(key)
        known = len(path)
        new: list[tuple[_EntryKey, _Entry]] = []
        for index in range(known, len(pieces)):
            key = (start if entry is None else entry.id, pieces[index])
            entry = self._next(start, entry, ids_of(index))
            keys += entry.keys
            new.append((key, entry))
        with self._lock:
            for key, made in new:
                self._entries.put(key, made, _size(key[1], made))
            # What others build upon is used last, so that it never goes before them.
            self._entries.touch(reversed(path))
        if after or entry is None:
            entry = self._next(start, entry, after or TokenIds("I"))
            keys += entry.keys
        return entry.tokens, keys

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def size(self) -> int:
        """Bytes in use."""
        return self._entries.size

    def _next(self, start: Start, before: _Entry | None, ids: TokenIds) -> _Entry:
        """The entry of a piece with the tokens `ids`."""
        if before is None:
            last, pending, tokens = None, TokenIds("I", start.before) + ids, len(start.before) // ids.itemsize
        else:
            last, pending, tokens = before.last, before.rest + ids, before.tokens
        chain = self._hasher.chain(pending, start.extra, parent=last)
        return _Entry(
            id=next(self._ids),
            tokens=tokens + len(ids),
            last=chain[-1] if chain else last,
            rest=pending[len(chain) * self._hasher.block_size :],
            keys=[block_hash[:KEY_BYTES] for block_hash in chain],
        )


def _size(piece: str, entry: _Entry) -> int:
    return _ENTRY_BYTES + sys.getsizeof(piece) + _KEY_BYTES * len(entry.keys) + entry.rest.itemsize * len(entry.rest)

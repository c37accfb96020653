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
from typing import NamedTuple

from vllm_pd.block_hash import KEY_BYTES, BlockHash, BlockHasher, BlockKey, ExtraKeys
from vllm_pd.router.encoder import NO_IDS, TokenIds
from vllm_pd.router.lru import ByteLru

MAX_BYTES = 64 * 1024 * 1024
SHORT_PIECE = 128
"""Characters up to which a prompt's last piece is not kept."""

_ENTRY_BYTES = 700
"""An entry without its piece and its keys, with what the cache needs for it."""
_KEY_BYTES = 56


class Start(NamedTuple):
    """What prompts can differ in before their first piece."""

    extra: ExtraKeys | None
    before: bytes = b""
    """Tokens that the tokenizer puts in front, as the bytes of a `TokenIds`."""
    generation: int = 0
    """`Encoder.generation`."""


class _Entry:
    """What is known of a prompt up to the end of a piece."""

    __slots__ = ("id", "keys", "last", "piece", "rest", "tokens")

    def __init__(
        self, id: int, piece: str, tokens: int, last: BlockHash | None, rest: TokenIds, keys: list[BlockKey]
    ) -> None:
        self.id = id
        self.piece = piece
        self.tokens = tokens
        self.last = last
        self.rest = rest
        self.keys = keys
        """Of the blocks that end in this piece."""


_EntryKey = tuple[Start | int, int, str]
"""The entry before it, or the start; the length of the piece, and its end. Comparing a long text with the one that is
kept takes a tenth of hashing it, so not all of it is part of the key. Of two pieces with one key the newer stays."""
_END_CHARS = 24


def _key(before: Start | int, piece: str) -> _EntryKey:
    return before, len(piece), piece[-_END_CHARS:]


class Walk:
    """How far a prompt is known."""

    __slots__ = ("entry", "path", "start")

    def __init__(self, start: Start, entry: _Entry | None, path: list[tuple[_EntryKey, _Entry]]) -> None:
        self.start = start
        self.entry = entry
        self.path = path

    @property
    def pieces(self) -> int:
        """Number of pieces that are known."""
        return len(self.path)


class HashChain:
    """The chains of one pool. Safe to call from several threads: only looking up and keeping needs the lock."""

    def __init__(self, hasher: BlockHasher, max_bytes: int = MAX_BYTES) -> None:
        self._hasher = hasher
        self._entries: ByteLru[_EntryKey, _Entry] = ByteLru(max_bytes)
        self._ids = itertools.count()
        self._lock = threading.Lock()

    def walk(self, start: Start, pieces: Sequence[str]) -> Walk:
        """As far as `pieces` are known. Equal ones behind equal ones, or behind an equal start, have equal tokens."""
        entry: _Entry | None = None
        path: list[tuple[_EntryKey, _Entry]] = []
        before: Start | int = start
        with self._lock:
            get = self._entries.get
            for piece in pieces:
                key = before, len(piece), piece[-_END_CHARS:]  # `_key`, without a call for each piece
                found = get(key)
                if found is None or found.piece != piece:
                    break
                entry = found
                before = found.id
                path.append((key, found))
            # What others build upon is used last, so that it never goes before them.
            self._entries.touch(key for key, _ in reversed(path))
        return Walk(start, entry, path)

    def keys(
        self, walk: Walk, pieces: Sequence[str], ids_of: Callable[[int], TokenIds], after: TokenIds = NO_IDS
    ) -> tuple[int, list[BlockKey]]:
        """Number of tokens and the keys of all whole blocks.

        Args:
            walk: of `pieces`.
            ids_of: the tokens of the piece at an index.
            after: tokens that follow the last piece.
        """
        start, entry = walk.start, walk.entry
        keys: list[BlockKey] = []
        for _, known in walk.path:
            keys += known.keys
        new: list[tuple[_EntryKey, _Entry]] = []
        for index in range(walk.pieces, len(pieces)):
            piece = pieces[index]
            key = _key(start if entry is None else entry.id, piece)
            entry = self._next(start, entry, piece, ids_of(index))
            keys += entry.keys
            # What is short, as the beginning of an answer, is hashed sooner than kept.
            if len(piece) > SHORT_PIECE or index + 1 < len(pieces):
                new.append((key, entry))
        if new:
            with self._lock:
                for key, made in new:
                    self._entries.put(key, made, _size(made))
        if after or entry is None:
            entry = self._next(start, entry, "", after)
            keys += entry.keys
        return entry.tokens, keys

    @property
    def kept_bytes(self) -> int:
        """What is kept, about."""
        return self._entries.size

    def _next(self, start: Start, before: _Entry | None, piece: str, ids: TokenIds) -> _Entry:
        """The entry of a piece with the tokens `ids`."""
        if before is None:
            front = TokenIds("I", start.before)
            last, pending, tokens = None, front + ids, len(front)
        else:
            last, pending, tokens = before.last, before.rest + ids, before.tokens
        chain = self._hasher.chain(pending, start.extra, parent=last)
        return _Entry(
            next(self._ids),
            piece,
            tokens + len(ids),
            chain[-1] if chain else last,
            pending[len(chain) * self._hasher.block_size :],
            [block_hash[:KEY_BYTES] for block_hash in chain],
        )


def _size(entry: _Entry) -> int:
    return (
        _ENTRY_BYTES + sys.getsizeof(entry.piece) + _KEY_BYTES * len(entry.keys) + entry.rest.itemsize * len(entry.rest)
    )

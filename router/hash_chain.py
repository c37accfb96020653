"""Block keys of prompts that begin alike, computed once.

A prompt comes in pieces (a chat's messages, more or less). Each piece, in its place behind certain other pieces, has
an entry: how many tokens the prompt has up to its end, the keys of the blocks that it completed, the last block's
hash, and the tokens that fill no block yet. Going on from an entry is exact, so the next turn of a conversation costs
a comparison per known piece and the hashing of what is new.
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

    __slots__ = ("follower", "id", "key", "keys", "last", "piece", "rest", "tokens")

    def __init__(
        self,
        id: int,
        key: _EntryKey,
        piece: str,
        tokens: int,
        last: BlockHash | None,
        rest: TokenIds,
        keys: list[BlockKey],
    ) -> None:
        self.id = id
        self.key = key
        self.piece = piece
        self.tokens = tokens
        self.last = last
        self.rest = rest
        self.keys = keys
        """Of the blocks that end in this piece."""
        self.follower: _EntryKey | None = None
        """Of the piece that came next the last time."""


_EntryKey = tuple[Start | int, int, str]
"""The entry before it, or the start; the length of the piece, and its end. Comparing a long text with the one that is
kept takes a tenth of hashing it, so not all of it is part of the key. Of two pieces with one key the newer stays."""
_END_CHARS = 24


def _key(place: Start | int, text: str, begin: int, end: int) -> _EntryKey:
    """Of the piece of `text` from `begin` to `end`. `place`: the entry before it, or the start."""
    return place, end - begin, text[max(begin, end - _END_CHARS) : end]


class Walk:
    """How far a text is known."""

    __slots__ = ("end", "path", "start")

    def __init__(self, start: Start, path: list[_Entry], end: int) -> None:
        self.start = start
        self.path = path
        """Entries of the known pieces."""
        self.end = end
        """Characters of them all."""


class HashChain:
    """The chains of one pool. Safe to call from several threads: only looking up and keeping needs the lock."""

    def __init__(self, hasher: BlockHasher, max_bytes: int = MAX_BYTES) -> None:
        self._hasher = hasher
        self._entries: ByteLru[_EntryKey, _Entry] = ByteLru(max_bytes)
        self._ids = itertools.count()
        self._lock = threading.Lock()

    def walk(self, start: Start, text: str, separator: str | None) -> Walk:
        """As far as the pieces of `text` are known. Equal ones behind equal ones, or behind an equal start, have equal
        tokens.

        Args:
            separator: what each piece but the first begins with, and none has elsewhere; None if there is one piece.
        """
        path: list[_Entry] = []
        place: Start | int = start
        follower: _EntryKey | None = None
        at, size = 0, len(text)
        with self._lock:
            get = self._entries.get
            while at < size:
                # What came next the last time mostly does again. Then its end need not be searched for.
                found = get(follower) if follower is not None else None
                if found is None or not _is_piece(found.piece, text, at, separator):
                    key = _key(place, text, at, _end(text, at, separator))
                    found = get(key)
                    if found is None or not text.startswith(found.piece, at):
                        break
                    if path:
                        path[-1].follower = key
                path.append(found)
                place, follower = found.id, found.follower
                at += len(found.piece)
            # What others build upon is used last, so that it never goes before them.
            self._entries.touch([entry.key for entry in reversed(path)])
        return Walk(start, path, at)

    def keys(
        self, walk: Walk, pieces: Sequence[str], ids_of: Callable[[str], TokenIds], after: TokenIds = NO_IDS
    ) -> tuple[int, list[BlockKey]]:
        """Number of tokens and the keys of all whole blocks.

        Args:
            pieces: of the text behind `walk.end`.
            ids_of: the tokens of a piece.
            after: tokens that follow the last piece.
        """
        entry = walk.path[-1] if walk.path else None
        keys: list[BlockKey] = []
        for known in walk.path:
            keys += known.keys
        new: list[_Entry] = []
        for index, piece in enumerate(pieces):
            before, entry = entry, self._next(walk.start, entry, piece, ids_of(piece))
            keys += entry.keys
            # What is short, as the beginning of an answer, is hashed sooner than kept.
            if len(piece) > SHORT_PIECE or index + 1 < len(pieces):
                new.append(entry)
                if before is not None:
                    before.follower = entry.key
        if new:
            with self._lock:
                for made in new:
                    self._entries.put(made.key, made, _size(made))
        if after or entry is None:
            entry = self._next(walk.start, entry, "", after)
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
        # A list of numbers is read in less time than an array, which makes them one by one.
        chain = self._hasher.chain(pending.tolist(), start.extra, parent=last)
        return _Entry(
            next(self._ids),
            _key(start if before is None else before.id, piece, 0, len(piece)),
            piece,
            tokens + len(ids),
            chain[-1] if chain else last,
            pending[len(chain) * self._hasher.block_size :],
            [block_hash[:KEY_BYTES] for block_hash in chain],
        )


def _end(text: str, at: int, separator: str | None) -> int:
    """Where the piece that begins at `at` ends."""
    found = text.find(separator, at + 1) if separator is not None else -1
    return len(text) if found < 0 else found


def _is_piece(piece: str, text: str, at: int, separator: str | None) -> bool:
    """Whether the piece of `text` that begins at `at` is this one, which is a piece of some text."""
    end = at + len(piece)
    if not text.startswith(piece, at):
        return False
    return end == len(text) or (separator is not None and text.startswith(separator, end))


def _size(entry: _Entry) -> int:
    return (
        _ENTRY_BYTES + sys.getsizeof(entry.piece) + _KEY_BYTES * len(entry.keys) + entry.rest.itemsize * len(entry.rest)
    )

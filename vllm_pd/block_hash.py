"""Block hashes as vLLM computes them, without vLLM.

A block's hash covers its parent's hash, its token ids and its extra keys (LoRA adapter, cache salt): SHA-256 over the
canonical CBOR encoding of the three. The encoding is put together by hand here, which takes a third of the time.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Sequence
from dataclasses import dataclass

KEY_BYTES = 15
"""Bytes of a block hash that the index keeps: 120 bits. One more would cost 16: a bytes object of 15 takes 48 bytes."""

BlockKey = bytes
"""The first `KEY_BYTES` bytes of a block hash."""

BlockHash = bytes
"""All 32 bytes of a block hash; what the next block's hash is computed from."""

SUPPORTED_ALGORITHM = "sha256_cbor"
"""The one algorithm whose hashes do not depend on the Python version, and which `--kv-connector pd` sets."""

_DEFAULT_SEED = "vllm-none-hash"
_MAX_TABLE = 1 << 20
"""Token ids below this are encoded once and kept; no vocabulary is larger."""


@dataclass(frozen=True, slots=True)
class Lora:
    """An adapter as a worker knows it. Both parts are hashed: re-pointing a name must not find the old adapter's KV."""

    name: str
    path: str


@dataclass(frozen=True, slots=True)
class ExtraKeys:
    """What else is hashed into the first block of a prompt, and into each later one; encoded. See `extra_keys`."""

    first: bytes
    later: bytes


def key_of(block_hash: BlockHash) -> BlockKey:
    """What the index keeps of a hash."""
    return block_hash[:KEY_BYTES]


def extra_keys(lora: Lora | None = None, cache_salt: str | None = None) -> ExtraKeys:
    """The extra keys of a prompt without media or embeddings.

    Raises:
        ValueError: a text holds half of a surrogate pair, which vLLM cannot hash either.
    """
    adapter = [_array(_text("lora"), _text(lora.name), _text(lora.path))] if lora is not None else []
    salt = [_array(_text("cache_salt"), _text(cache_salt))] if cache_salt else []
    return ExtraKeys(_array_or_null(adapter + salt), _array_or_null(adapter))


class BlockHasher:
    """Hashes whole blocks of one pool.

    Args:
        block_size: tokens per block.
        hash_algo: the workers' `--prefix-caching-hash-algo`.
        hash_seed: their PYTHONHASHSEED where it is set, else "".

    Raises:
        ValueError: hashes of `hash_algo` cannot be recomputed outside of the worker, or `block_size` is not positive.
    """

    def __init__(self, block_size: int, hash_algo: str = SUPPORTED_ALGORITHM, hash_seed: str = "") -> None:
        if hash_algo != SUPPORTED_ALGORITHM:
            raise ValueError(
                f"Block hashes of the algorithm {hash_algo!r} cannot be recomputed outside of the worker; "
                f"start the workers with --prefix-caching-hash-algo {SUPPORTED_ALGORITHM}."
            )
        if block_size < 1:
            raise ValueError(f"A block holds at least one token, not {block_size}.")
        self.block_size = block_size
        self.root: BlockHash = hashlib.sha256(_text(hash_seed or _DEFAULT_SEED)).digest()
        """Stands for the parent of a first block."""
        self._after_parent = _head(4, block_size)

    def chain(
        self, token_ids: Sequence[int], extra: ExtraKeys | None = None, *, parent: BlockHash | None = None
    ) -> list[BlockHash]:
        """Hashes of the whole blocks of `token_ids`, in order; what is left over at the end is ignored.

        Args:
            token_ids: none of them negative.
            extra: of the request; None when it has none.
            parent: hash of the block before, to go on from there; None at the beginning of a prompt.
        """
        size = self.block_size
        end = len(token_ids) - len(token_ids) % size
        if not end:
            return []
        encoded = _encoded(token_ids)
        join, sha256 = b"".join, hashlib.sha256
        later = _NULL if extra is None else extra.later
        before, middle = b"\x83\x58\x20", self._after_parent
        hashes: list[BlockHash] = []
        start = 0
        if parent is None:
            first = _NULL if extra is None else extra.first
            parent = sha256(join((before, self.root, middle, join(encoded[:size]), first))).digest()
            hashes.append(parent)
            start = size
        for at in range(start, end, size):
            parent = sha256(join((before, parent, middle, join(encoded[at : at + size]), later))).digest()
            hashes.append(parent)
        return hashes

    def keys(self, token_ids: Sequence[int], extra: ExtraKeys | None = None) -> list[BlockKey]:
        """The index keys of a prompt's whole blocks."""
        return [block_hash[:KEY_BYTES] for block_hash in self.chain(token_ids, extra)]


# CBOR (RFC 8949) in its canonical form: every length and number takes as few bytes as it can.

_NULL = b"\xf6"


def _head(kind: int, value: int) -> bytes:
    """Major type and argument. Raises ValueError for what needs more than eight bytes, or is negative."""
    if 0 <= value < 24:
        return bytes((kind << 5 | value,))
    for extra, size in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if 0 <= value < 1 << 8 * size:
            return bytes((kind << 5 | extra,)) + value.to_bytes(size, "big")
    raise ValueError(f"{value} is not a token id.")


def _text(value: str) -> bytes:
    data = value.encode()
    return _head(3, len(data)) + data


def _array(*items: bytes) -> bytes:
    return _head(4, len(items)) + b"".join(items)


def _array_or_null(items: list[bytes]) -> bytes:
    return _array(*items) if items else _NULL


_table = [_head(0, value) for value in range(1 << 16)]


def _encoded(token_ids: Sequence[int]) -> Sequence[bytes]:
    """Each id's encoding. Most of the time of hashing goes here, hence the table."""
    global _table
    if len(token_ids) < 2:
        return [_head(0, value) for value in token_ids]
    try:
        # Four fifths of what `map` takes.
        found: tuple[bytes, ...] = operator.itemgetter(*token_ids)(_table)
        return found
    except IndexError:
        largest = max(token_ids)
        if largest >= _MAX_TABLE:
            return [_head(0, value) for value in token_ids]
        # A new list, never the old one made longer: another thread may be doing the same.
        _table = table = [*_table, *(_head(0, value) for value in range(len(_table), largest + 1))]
        found = operator.itemgetter(*token_ids)(table)
        return found

"""Small stores with contents that can be told apart: block `i` has key `key(i)` and bytes `content(i)`."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.unit.kv_offload.faulty_io import FaultyIO
from vllm_pd.kv_offload.block_io.thread_io import ThreadIO
from vllm_pd.kv_offload.segments import Finished, Rows, SegmentStore, StoreConfig
from vllm_pd.kv_offload.segments.index import Group, Index

BLOCK = 8192
NAMESPACE = bytes(range(32))
LIMIT_S = 30.0


@functools.cache
def key(i: int) -> bytes:
    """As vLLM's: a hash and the number of a KV cache group."""
    return random.Random(i).randbytes(32) + b"\0\0\0\0"


def content(i: int, size: int = BLOCK) -> bytes:
    return random.Random(-1 - i).randbytes(64) * (size // 64) + bytes(size % 64)


def rows(blocks: Iterable[bytes]) -> Rows:
    """Memory of their own."""
    blocks = list(blocks)
    return Rows(memoryview(bytearray(b"".join(blocks))), range(len(blocks)))


def pinned(index: Index, i: int) -> Group | None:
    """Where block `i` is, as a load finds it: pinned until `unpin`."""
    return next(iter(index.locate([key(i)]).groups), None)


def config(root: Path, **changes: Any) -> StoreConfig:
    """64 blocks a segment, at most 8 a batch, eight segments."""
    segment = 72 * BLOCK
    settings: dict[str, Any] = {
        "root": root,
        "name": "model-a",
        "namespace": NAMESPACE,
        "block_bytes": BLOCK,
        "budget_bytes": 8 * segment,
        "floor_bytes": 0,
        "batch_bytes": 8 * BLOCK,
        "staging_bytes": 32 * BLOCK,
        "read_bytes": 16 * BLOCK,
        # Only tests about a slow disk refuse blocks because of it.
        "put_wait_s": LIMIT_S,
        "readers": 2,
        "open_files": 3,
    }
    return StoreConfig(**{**settings, **changes})


def until(condition: Callable[[], Any], what: str, limit_s: float = LIMIT_S) -> Any:
    """Waits for a true value and returns it."""
    deadline = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen within {limit_s:g} s"
        time.sleep(0.002)
    return value


class Rig:
    """A store over a disk that can be made to fail. Closes both at the end of a `with`."""

    def __init__(self, settings: StoreConfig, *, start: bool = True, **options: Any) -> None:
        self.config = settings
        self.disk = FaultyIO(ThreadIO(4))
        self.store = SegmentStore(settings, self.disk, **options)
        self.tickets = 0
        self.ended: dict[int, Finished] = {}
        if start:
            self.store.start()
            assert self.store.wait_recovered(LIMIT_S)

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.disk.clear()
        self.store.close(LIMIT_S)
        self.disk.close()

    def begin_put(self, numbers: Sequence[int]) -> int:
        self.tickets += 1
        size = self.config.block_bytes
        self.store.put(self.tickets, [key(i) for i in numbers], rows(content(i, size) for i in numbers))
        return self.tickets

    def begin_get(self, numbers: Sequence[int], deadline_s: float = LIMIT_S) -> tuple[int, list[memoryview]]:
        self.tickets += 1
        size = self.config.block_bytes
        memory = memoryview(bytearray(len(numbers) * size))
        self.store.get(self.tickets, [key(i) for i in numbers], Rows(memory, range(len(numbers))), deadline_s)
        return self.tickets, [memory[i * size : (i + 1) * size] for i in range(len(numbers))]

    def wait(self, ticket: int) -> Finished:
        def ended() -> Finished | None:
            self.ended.update((result.ticket, result) for result in self.store.finished())
            return self.ended.pop(ticket, None)

        result: Finished = until(ended, f"the end of ticket {ticket}")
        return result

    def put(self, numbers: Sequence[int]) -> Finished:
        """Blocks taken over; not yet written."""
        return self.wait(self.begin_put(numbers))

    def store_blocks(self, numbers: Sequence[int], portion: int = 32) -> None:
        """Blocks that are on the disk afterwards."""
        for first in range(0, len(numbers), portion):
            assert not self.put(numbers[first : first + portion]).failed
            assert self.store.flush(LIMIT_S)

    def get(self, numbers: Sequence[int], deadline_s: float = LIMIT_S) -> Finished:
        """Loads blocks; every one that is ok has exactly its bytes."""
        ticket, targets = self.begin_get(numbers, deadline_s)
        result = self.wait(ticket)
        ok = set(result.ok)
        for i, target in zip(numbers, targets, strict=True):
            if key(i) in ok:
                assert bytes(target) == content(i, self.config.block_bytes), f"block {i} is wrong"
        return result

    def stored(self, numbers: Iterable[int]) -> list[int]:
        """Those that the store says it has."""
        return [i for i in numbers if self.store.contains(key(i))]


def segment_paths(root: Path) -> list[Path]:
    return sorted(root.rglob("segment-*.kv"))


def used(root: Path) -> int:
    size = 0
    for path in segment_paths(root):
        # It may be evicted meanwhile.
        with suppress(FileNotFoundError):
            size += path.stat().st_size
    return size

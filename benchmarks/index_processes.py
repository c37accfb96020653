"""The two ends of `benchmarks.index`, each in a process of its own: an agent with its engine's events, and a mirror.

Both are started with one JSON argument. An agent says "ready", waits for the time at which it is to begin (seconds of
the machine's monotonic clock, one line), hands event messages over at the offered speed, and prints its result when it
is told to end (another line). The mirror follows until it has the last block of every agent.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import uvloop

from vllm_pd.agent.cache_feed import CacheFeed
from vllm_pd.background import end_tasks
from vllm_pd.block_hash import KEY_BYTES
from vllm_pd.router.index_watch import PoolMirror
from vllm_pd.sim.mock_events import BlockRemoved, BlockStored
from vllm_pd.state import BlockIndex, Epoch, Holder, PoolId, Position, StreamEntry, WorkerId, open_block_index

POOL = PoolId("be0cbe0cbe0cbe0c")
EPOCH = Epoch(1)
NAMESPACE = "benchmark"
TTL_MS = 120_000
MESSAGE_BLOCKS = 64
"""Blocks that a message stores, and that it removes."""
BLOCK_TOKENS = 16
LAST = 0xFFFFFFFF
DEADLINE_S = 120.0
_PROBE = b"\x00\xffprobe\xff\x00"
_NUMBERS = struct.Struct(">HI")
_encoder = msgspec.msgpack.Encoder()


def holder(agent: int) -> Holder:
    return Holder(WorkerId(f"10.0.0.{agent}:8000"))


def probe(agent: int, number: int) -> bytes:
    """A block hash by which the mirror knows a message again."""
    return (_PROBE + _NUMBERS.pack(agent, number)).ljust(32, b"\x01")


def probes(packed: bytes) -> list[tuple[int, int]]:
    """(agent, number) of every probe in packed keys."""
    found, at = [], packed.find(_PROBE)
    while at >= 0:
        agent, number = _NUMBERS.unpack_from(packed, at + len(_PROBE))
        found.append((agent, number))
        at = packed.find(_PROBE, at + KEY_BYTES)
    return found


def messages(agent: int, count: int, cache_blocks: int) -> tuple[list[bytes], list[bytes]]:
    """Messages as vLLM encodes them: those that fill the cache, then `count` that store blocks in place of the oldest.

    Each of the latter has a probe, the last one `LAST`.
    """
    token_ids = list(range(1000, 1000 + MESSAGE_BLOCKS * BLOCK_TOKENS))
    held: deque[list[bytes]] = deque()

    def stored(last: list[bytes]) -> BlockStored:
        noise = os.urandom(32 * (MESSAGE_BLOCKS - len(last)))
        hashes = [noise[at : at + 32] for at in range(0, len(noise), 32)] + last
        held.append(hashes)
        return BlockStored(hashes, None, token_ids, BLOCK_TOKENS, None, "GPU", None)

    def encoded(*events: Any) -> bytes:
        return _encoder.encode([0.0, events, 0])

    fill = [encoded(stored([])) for _ in range(cache_blocks // MESSAGE_BLOCKS)]
    numbers = [*range(count - 1), LAST]
    return fill, [encoded(BlockRemoved(held.popleft(), "GPU"), stored([probe(agent, n)])) for n in numbers]


async def until(done: Callable[[], bool]) -> bool:
    """Whether it came true before the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not done():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.005)
    return True


async def agent(options: dict[str, Any]) -> dict[str, Any]:
    """One worker's agent: messages in, block index out.

    Options: url, number, messages, cache_blocks, and per_s, the messages to hand over per second.
    """
    number, per_s = options["number"], options["per_s"]
    fill, todo = messages(number, options["messages"], options["cache_blocks"])
    index = open_block_index(options["url"], NAMESPACE, timeout_s=5.0)
    writer = index.writer(POOL, holder(number), EPOCH, TTL_MS)
    feed = CacheFeed(holder(number), writer, None, ttl_ms=TTL_MS, renew_s=5.0)
    feed.start()
    for payload in fill:
        feed.message(payload)
    feed.feeder.allow(True)
    await until(lambda: feed.feeder.stats.announcements > 0)
    print("ready", flush=True)
    begin = float(sys.stdin.readline())
    await asyncio.sleep(max(0.0, begin - time.monotonic()))
    cpu, times = time.process_time(), []
    for position, payload in enumerate(todo):
        due = begin + position / per_s
        # Also when it is late: the feeder and the store's answers need a turn.
        if position % 4 == 0 or due > time.monotonic():
            await asyncio.sleep(max(0.0, due - time.monotonic()))
        times.append(time.monotonic())
        feed.message(payload)
    handed_over = time.monotonic()
    # Until the mirror has everything.
    await asyncio.to_thread(sys.stdin.readline)
    cpu = time.process_time() - cpu
    announced = feed.feeder.stats.announcements - 1
    await feed.stop()
    await index.close()
    return {
        "changes": 2 * MESSAGE_BLOCKS * len(todo),
        "held": sum(len(packed) // KEY_BYTES for packed in feed.truth.held().values()),
        "times": times,
        "handed_over": handed_over,
        "cpu_s": cpu,
        "announced": announced,
        "writes": feed.feeder.stats.batches,
    }


class _Probed:
    """The index as a mirror reads it; notes when a probe has been applied, which is when the mirror asks for more."""

    def __init__(self, index: BlockIndex) -> None:
        self._index = index
        self._pending: list[tuple[int, int]] = []
        self.seen: dict[tuple[int, int], float] = {}

    async def read(self, pool: PoolId, after: Position, *, wait_ms: int, limit: int = 256) -> Sequence[StreamEntry]:
        now = time.monotonic()
        for found in self._pending:
            self.seen.setdefault(found, now)
        entries = await self._index.read(pool, after, wait_ms=wait_ms, limit=limit)
        self._pending = [found for entry in entries for found in probes(entry.change.blocks.get(1, b""))]
        return entries

    def __getattr__(self, name: str) -> Any:
        return getattr(self._index, name)


async def mirror(options: dict[str, Any]) -> dict[str, Any]:
    """A router's mirror of the pool. Options: url, agents."""
    index = open_block_index(options["url"], NAMESPACE, timeout_s=5.0)
    store = _Probed(index)
    wanted = {holder(number): EPOCH for number in range(options["agents"])}
    pool_mirror = PoolMirror(POOL, store, lambda: wanted, lambda: 0, time.monotonic)  # type: ignore[arg-type]
    task = asyncio.create_task(pool_mirror.run())
    await until(lambda: pool_mirror.loaded)
    print("ready", flush=True)
    cpu, before = time.process_time(), pool_mirror.counts.blocks
    last = [[probe(number, LAST)[:KEY_BYTES]] for number in range(options["agents"])]
    complete = await until(lambda: all(map(pool_mirror.prefixes.lookup, last)))
    ended = time.monotonic()
    cpu = time.process_time() - cpu
    await end_tasks([task])
    await index.close()
    return {
        "complete": complete,
        "ended": ended,
        "cpu_s": cpu,
        "blocks": pool_mirror.counts.blocks - before,
        "held": {number: pool_mirror.prefixes.blocks(holder(number)) for number in range(options["agents"])},
        "seen": [(number, n, at) for (number, n), at in store.seen.items() if n != LAST],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """`agent JSON` or `mirror JSON`."""
    role, options = (argv or sys.argv[1:])[:2]
    run = {"agent": agent, "mirror": mirror}[role]
    print(json.dumps(uvloop.run(run(json.loads(options)))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

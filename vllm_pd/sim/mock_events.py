"""KV events of a mock worker: published and replayed in vLLM's wire format."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import zmq

from vllm_pd.agent.kv_event_source import EventEndpoints
from vllm_pd.block_hash import BlockHash
from vllm_pd.state.block_index import Tier

# Plain integers: operations on enum flags would cost more than all the rest.
_GPU, _CPU, _SSD = int(Tier.GPU), int(Tier.CPU), int(Tier.SSD)
_MEDIA = {_GPU: "GPU", _CPU: "CPU", _SSD: "STORAGE"}
_END = (-1).to_bytes(8, "big", signed=True)
BUFFER_MESSAGES = 10_000
"""Messages kept for replay, as many as vLLM keeps."""


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True):
    """As vLLM encodes it; tiers below the GPU name hashes only."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True):
    """As vLLM encodes it."""

    block_hashes: list[BlockHash]
    medium: str
    group_idx: int | None = None


class _Batch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved]
    data_parallel_rank: int | None = None


@dataclass(frozen=True, slots=True)
class BlockContent:
    """What a block holds, as its event says it."""

    parent: BlockHash | None
    token_ids: Sequence[int]
    lora_name: str | None


class BlockEvents:
    """Turns changes of a cache into events. Blocks are described before they are stored."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._held: dict[BlockHash, int] = {}
        self._contents: dict[BlockHash, BlockContent] = {}
        self._users: dict[BlockHash, int] = {}
        """By how many requests that may yet store it a block is described."""

    def describe(self, block: BlockHash, content: BlockContent) -> None:
        """Say what is in a block that a request may store. `forget` must follow."""
        self._contents.setdefault(block, content)
        self._users[block] = self._users.get(block, 0) + 1

    def forget(self, blocks: Iterable[BlockHash]) -> None:
        """A request that described them will store none of these any more."""
        for block in blocks:
            users = self._users.pop(block, 0) - 1
            if users > 0:
                self._users[block] = users
            elif block not in self._held:
                self._contents.pop(block, None)

    def count(self, tier: Tier) -> int:
        """Blocks held on a tier."""
        return sum(1 for bits in self._held.values() if bits & tier)

    def events(self, changed: Mapping[BlockHash, int]) -> list[BlockStored | BlockRemoved]:
        """The events of some changes: block -> tier bits that hold now."""
        events: list[BlockStored | BlockRemoved] = []
        for tier, medium in _MEDIA.items():
            gone = [block for block, bits in changed.items() if self._held.get(block, 0) & tier & ~bits]
            if gone:
                events.append(BlockRemoved(gone, medium))
        for tier, medium in _MEDIA.items():
            new = {block for block, bits in changed.items() if bits & tier & ~self._held.get(block, 0)}
            if tier == _GPU:
                events.extend(self._stored(run) for run in self._runs(new))
            elif new:
                events.append(BlockStored(list(new), None, [], 0, None, medium, None))
        for block, bits in changed.items():
            if bits:
                self._held[block] = bits
            else:
                self._held.pop(block, None)
                if block not in self._users:
                    self._contents.pop(block, None)
        return events

    def _stored(self, run: list[BlockHash]) -> BlockStored:
        first = self._contents[run[0]]
        tokens = [token for block in run for token in self._contents[block].token_ids]
        lora_id = None if first.lora_name is None else 1
        return BlockStored(run, first.parent, tokens, self._block_size, lora_id, "GPU", first.lora_name)

    def _runs(self, blocks: set[BlockHash]) -> Iterator[list[BlockHash]]:
        """The blocks as chains from parent to child, each as long as possible."""
        children: dict[BlockHash | None, list[BlockHash]] = {}
        for block in blocks:
            children.setdefault(self._contents[block].parent, []).append(block)
        starts = [block for block in blocks if self._contents[block].parent not in blocks]
        while starts:
            run = [starts.pop()]
            while following := children.get(run[-1]):
                starts.extend(following[1:])
                run.append(following[0])
            yield run


class EventPublisher:
    """A PUB and a ROUTER socket on loopback ports of their own, served by the running loop.

    `drop` is the part of the messages that is not sent but kept for replay; with `drop_replay` they are not kept
    either, so that they are lost for good.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], host: str = "127.0.0.1", seed: int = 0) -> None:
        self.drop = 0.0
        self.drop_replay = False
        self._random = random.Random(seed)
        self._live = context.socket(zmq.PUB)
        self._live.set_hwm(100_000)
        self._live.bind(f"tcp://{host}:0")
        self._replay = context.socket(zmq.ROUTER)
        self._replay.bind(f"tcp://{host}:0")
        self.endpoints = EventEndpoints(
            self._live.getsockopt_string(zmq.LAST_ENDPOINT), self._replay.getsockopt_string(zmq.LAST_ENDPOINT)
        )
        self._sequence = 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=BUFFER_MESSAGES)
        self._encoder = msgspec.msgpack.Encoder()
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(self._replay.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self._serve_replays)

    def publish(self, events: list[BlockStored | BlockRemoved]) -> None:
        """One message. Never waits."""
        payload = self._encoder.encode(_Batch(time.time(), events, 0))
        number, self._sequence = self._sequence, self._sequence + 1
        dropped = self._random.random() < self.drop
        if not (dropped and self.drop_replay):
            self._kept.append((number, payload))
        if not dropped:
            self._live.send_multipart((b"", number.to_bytes(8, "big"), payload), zmq.NOBLOCK)
        # The descriptor signals a change once, and sending may have taken note of it.
        self._serve_replays()

    def _serve_replays(self) -> None:
        while True:
            try:
                request = self._replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(request) != 3:
                continue
            client, _, start = request
            first = int.from_bytes(start, "big")
            for number, payload in self._kept:
                if number >= first:
                    self._replay.send_multipart((client, b"", b"", number.to_bytes(8, "big"), payload))
            self._replay.send_multipart((client, b"", b"", _END, b""))

    def close(self) -> None:
        """Close the sockets. Idempotent."""
        if not self._live.closed:
            self._loop.remove_reader(self._descriptor)
            self._live.close(linger=0)
            self._replay.close(linger=0)

"""A publisher of KV events with vLLM's protocol, which drops, repeats and reorders messages on demand."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from vllm_pd.agent.kv_event_source import EventEndpoints

END = (-1).to_bytes(8, "big", signed=True)


def stored(hashes: Sequence[bytes | int], medium: str = "GPU", group: int = 0, kind: str | None = None) -> Any:
    """The event as vLLM encodes it, with the fields that nobody here reads."""
    return {
        "type": "BlockStored", "block_hashes": list(hashes), "parent_block_hash": None, "token_ids": [7] * 4,
        "block_size": 4, "lora_id": None, "medium": medium, "lora_name": None, "group_idx": group,
        "kv_cache_spec_kind": kind,
    }  # fmt: skip


def removed(hashes: Sequence[bytes], medium: str = "GPU", group: int = 0) -> Any:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": medium, "group_idx": group}


CLEARED = {"type": "AllBlocksCleared"}


class Publisher:
    """One engine's sockets, in a thread of their own as in vLLM. `stop` and `Publisher(...)` again is a restart."""

    def __init__(self, folder: Path, buffer: int = 10_000, topic: str = "kv") -> None:
        self.endpoints = EventEndpoints(f"ipc://{folder}/live", f"ipc://{folder}/replay", topic)
        self._topic = topic.encode()
        self._buffer: list[tuple[int, bytes]] = []
        self._size = buffer
        self._sequence = 0
        self._todo: queue.Queue[tuple[str, bytes] | None] = queue.Queue()
        self._held: list[tuple[int, bytes]] = []
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._bound = threading.Event()
        self._thread.start()
        assert self._bound.wait(10)

    def publish(self, events: Sequence[Any], how: str = "send") -> None:
        """`how`: send, drop (a subscriber never sees it), twice, late (after the next one)."""
        self.publish_raw(msgspec.msgpack.encode([time.time(), list(events), 0]), how)

    def publish_raw(self, payload: bytes, how: str = "send") -> None:
        self._todo.put((how, payload))

    def stop(self) -> None:
        self._todo.put(None)
        self._thread.join(10)
        assert not self._thread.is_alive()

    def _main(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        live, replay = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        live.bind(self.endpoints.live)
        if self.endpoints.replay:
            replay.bind(self.endpoints.replay)
        self._bound.set()
        try:
            while True:
                while replay.poll(0):
                    self._serve(replay)
                try:
                    item = self._todo.get(timeout=0.01)
                except queue.Empty:
                    continue
                if item is None:
                    return
                self._send(live, *item)
        finally:
            context.destroy(linger=0)

    def _send(self, live: zmq.Socket[bytes], how: str, payload: bytes) -> None:
        number, self._sequence = self._sequence, self._sequence + 1
        self._buffer = [*self._buffer, (number, payload)][-self._size :]
        if how == "late":
            self._held.append((number, payload))
            return
        for _ in range({"send": 1, "drop": 0, "twice": 2}[how]):
            live.send_multipart((self._topic, number.to_bytes(8, "big"), payload))
        held, self._held = self._held, []
        for number, payload in held:
            live.send_multipart((self._topic, number.to_bytes(8, "big"), payload))

    def _serve(self, replay: zmq.Socket[bytes]) -> None:
        client, _, start = replay.recv_multipart()
        for number, payload in self._buffer:
            if number >= int.from_bytes(start, "big"):
                replay.send_multipart((client, b"", self._topic, number.to_bytes(8, "big"), payload))
        replay.send_multipart((client, b"", b"", END, b""))

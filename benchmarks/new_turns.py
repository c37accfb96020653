"""Chats of several turns, each request with a last turn that is new, and a cluster that holds the turns before.

The cluster is a store with two mock workers in it: their record, the tokenizer of a real model, and a block index in
which one of them has the conversation and both have many other blocks. Routers that are given the store route by it.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.common import cpu_seconds, percentile
from benchmarks.load import http_request, run_load
from scripts.models import smollm2_dir
from vllm_pd.block_hash import KEY_BYTES
from vllm_pd.graph.embedded_store import EmbeddedStore
from vllm_pd.graph.metrics_text import scrape
from vllm_pd.graph.ports import free_port
from vllm_pd.graph.process import ManagedProcess, ProcessSpec
from vllm_pd.router.decision import PromptKind
from vllm_pd.router.model_folder import read_tokenizer_files
from vllm_pd.router.prompt_blocks import PromptHasher
from vllm_pd.router.prompt_tokenizer import PromptTokenizer
from vllm_pd.router.request_fields import read_fields
from vllm_pd.state import (
    Epoch,
    Holder,
    PoolSpec,
    Role,
    Tier,
    WorkerId,
    WorkerRecord,
    open_block_index,
    open_registry,
)

MODEL = "mock"
SPEC = PoolSpec("smollm2", "main", "bfloat16", "bfloat16", "cpu/auto", 32, "sha256_cbor", "any")
OTHER_BLOCKS = 10_000
"""Blocks of other prompts that each worker holds."""
LEASE_MS = 3_600_000
START_DEADLINE_S = 60.0
CONNECTIONS = 16
BARE, KV = "vllm-pd bare", "vllm-pd by blocks"
WAYS = {BARE: ["--policy", "round-robin", "--index", "off"], KV: []}
_PASSAGE = Path(__file__).parents[1] / "scripts" / "demo_passage.txt"
TURNS, TURN_BYTES, NEW_BYTES = 9, 3000, 1500


class NewTurns:
    """The bodies of one conversation."""

    def __init__(self, seed: int = 1) -> None:
        self._chance = random.Random(seed)
        self._words = _PASSAGE.read_text().split()
        roles = ("user", "assistant")
        self._history = [
            {"role": "system", "content": self._text(500)},
            *({"role": roles[n % 2], "content": self._text(TURN_BYTES)} for n in range(TURNS - 1)),
        ]

    def _text(self, size: int) -> str:
        """Words of a passage of prose, in an order of their own."""
        words = self._chance.choices(self._words, k=size // 4)
        return " ".join(words)[:size]

    def body(self) -> bytes:
        """One request, about 30 KB, with a last turn that none before had."""
        last = {"role": "user", "content": self._text(NEW_BYTES)}
        return json.dumps({"model": MODEL, "messages": [*self._history, last], "max_tokens": 64}).encode()


async def fill_store(url: str, ports: Sequence[int], turns: NewTurns) -> None:
    """Register the workers at `ports`; the first of them holds the conversation.

    Raises:
        StoreError: the store does not answer.
        RuntimeError: the model's prompts cannot be hashed.
    """
    files = await asyncio.to_thread(lambda: read_tokenizer_files(Path(smollm2_dir())))
    fields = read_fields(turns.body())
    assert fields is not None
    prompt = PromptHasher(SPEC, PromptTokenizer(files)).blocks(fields, PromptKind.CHAT)
    if prompt.why_unknown:
        raise RuntimeError(f"the prompts of {smollm2_dir()} cannot be hashed: {prompt.why_unknown}")
    registry, index = open_registry(url, "default", timeout_s=5.0), open_block_index(url, "default", timeout_s=5.0)
    chance = random.Random(2)
    try:
        sha = await registry.put_tokenizer(SPEC.id, files, LEASE_MS)
        for n, port in enumerate(ports):
            worker = WorkerId(f"127.0.0.1:{port}")
            held = chance.randbytes(OTHER_BLOCKS * KEY_BYTES)
            if n == 0:
                held += b"".join(prompt.keys[: -NEW_BYTES // 100])
            await index.writer(SPEC.id, Holder(worker), Epoch(1), LEASE_MS).replace({int(Tier.GPU): held})
            record = WorkerRecord(
                worker, Epoch(1), SPEC, f"http://{worker}", Role.BOTH, (MODEL,), kv_blocks=20_000, tokenizer=sha
            )
            await registry.heartbeat(record, LEASE_MS)
    finally:
        await index.close()
        await registry.close()


def measure(workers: Sequence[int], logs: Path, *, rounds: int, requests: int) -> list[dict[str, Any]]:
    """A row for each way to run the router, in front of mock workers at these ports; of several rounds the cheapest.

    The two take turns, so that what else the machine does meets both.

    Raises:
        ProcessError, LoadError, StoreError: something did not start or answer.
        RuntimeError: prompts were not looked up.
    """
    turns = NewTurns()
    with ExitStack() as stack:
        store = stack.enter_context(EmbeddedStore())
        asyncio.run(fill_store(store.url, workers, turns))
        routers: dict[str, tuple[int, int]] = {}
        for name, flags in WAYS.items():
            port = free_port()
            command = [sys.executable, "-m", "vllm_pd.router.cli", "--log-level", "error", "--port", str(port)]
            spec = ProcessSpec(name, [*command, "--store", store.url, *flags], logs / f"{name.replace(' ', '-')}.log")
            process = stack.enter_context(ManagedProcess(spec))
            process.wait_ready(f"http://127.0.0.1:{port}/ready", deadline_s=START_DEADLINE_S)
            routers[name] = process.pid, port
        rows: dict[str, list[dict[str, Any]]] = {name: [] for name in routers}
        # The first round is to know the conversation and the tokenizer, which is loaded in the background.
        for _ in range(rounds + 1):
            for name, (pid, port) in routers.items():
                rows[name].append(_round(name, pid, port, turns, requests))
        known = scrape(f"http://127.0.0.1:{routers[KV][1]}").value("vllm_pd_router_known_prompts_total")
        if known < rounds * requests:
            raise RuntimeError(f"only {known:.0f} of {(rounds + 1) * requests} prompts were looked up")
    return [min(each[1:], key=lambda row: float(row["cpu_us"])) for each in rows.values()]


def _round(name: str, pid: int, port: int, turns: NewTurns, requests: int) -> dict[str, Any]:
    bodies = [http_request("/v1/chat/completions", turns.body()) for _ in range(requests)]
    cpu, began = cpu_seconds(pid), time.perf_counter()
    timings = uvloop.run(run_load(port, bodies, requests=requests, connections=CONNECTIONS))
    took = time.perf_counter() - began
    return {
        "router": name,
        "body": "new turn",
        "mode": "plain",
        "connections": CONNECTIONS,
        "cpu_us": (cpu_seconds(pid) - cpu) / requests * 1e6,
        "p50_us": percentile(timings.total, 50) * 1e6,
        "p99_us": percentile(timings.total, 99) * 1e6,
        "requests_per_s": requests / took,
    }

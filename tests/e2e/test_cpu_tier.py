"""The tiers under a real server: prompts that were driven out of the KV cache come back, with the same answers."""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from scripts.models import tiny_model_dir
from vllm_pd.graph import metrics_text
from vllm_pd.graph.local import DEFAULT_START_DEADLINE_S
from vllm_pd.graph.metrics_text import Metrics
from vllm_pd.graph.ports import LOOPBACK, free_port
from vllm_pd.graph.process import ManagedProcess, ProcessSpec

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

BLOCK_TOKENS = 32
KV_BLOCKS = 64
BLOCK_BYTES = 128 * 1024
"""4 layers of keys and values for 32 tokens: 4 heads of 32 in float32."""

PROMPTS = 6
ANSWER_TOKENS = 8
TIED = 0.05
"""Log-probabilities closer than this are the same up to bfloat16 rounding; either token is right."""


@dataclass(frozen=True)
class Answer:
    tokens: list[str]
    top: list[dict[str, float]]


class Server:
    def __init__(self, port: int, model: str) -> None:
        self.url = f"http://{LOOPBACK}:{port}"
        self._model = model
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def ask(self, prompt: str) -> Answer:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 5,
        }
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with self._opener.open(request, timeout=60) as answer:
            logprobs = json.load(answer)["choices"][0]["logprobs"]
        return Answer(logprobs["tokens"], logprobs["top_logprobs"])

    def metrics(self) -> Metrics:
        return metrics_text.scrape(self.url)

    def computed(self) -> float:
        return self.metrics().value("vllm:prompt_tokens_by_source_total", source="local_compute")


@contextmanager
def serve(folder: Path, tier: dict[str, Any]) -> Iterator[Server]:
    model, port = tiny_model_dir(), free_port()
    connector = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"spec_module_path": "vllm_pd.kv_offload.spec", **tier},
    }
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(model)]
    command += ["--host", LOOPBACK, "--port", str(port), "--max-model-len", "1536", "--enforce-eager"]
    command += ["--dtype", "float32", "--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(KV_BLOCKS)]
    command += ["--shutdown-timeout", "15", "--kv-transfer-config", json.dumps(connector)]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    process = ManagedProcess(ProcessSpec("vllm", command, folder / "vllm.log", env))
    with process:
        process.wait_ready(f"http://{LOOPBACK}:{port}/health", deadline_s=DEFAULT_START_DEADLINE_S)
        yield Server(port, str(model))
    assert not process.left_shared_memory()


def prompts() -> list[str]:
    """Texts of some 700 tokens that differ from the first block on."""
    topics = ["rivers", "clocks", "bread", "maps", "winter", "music"]
    return [
        f"Chapter {i}, about {topic}. "
        + " ".join(
            f"On day {day} we wrote {day * (i + 3)} lines about {topic}, and kept {day + i}." for day in range(28)
        )
        for i, topic in enumerate(topics[:PROMPTS])
    ]


def assert_same(before: list[Answer], after: list[Answer]) -> None:
    """Equal tokens, or a tie at the first token that differs (what follows it is then another text)."""
    for old, new in zip(before, after, strict=True):
        for place, (a, b) in enumerate(zip(old.tokens, new.tokens, strict=True)):
            if a != b:
                top = old.top[place]
                assert b in top and top[a] - top[b] < TIED, f"{old.tokens} became {new.tokens}"
                break


def settle(server: Server) -> None:
    """Wait until the copies of the last request are done: the counter of stored bytes stands still."""
    deadline, last, calm = time.monotonic() + 30, -1.0, 0
    while calm < 3:
        assert time.monotonic() < deadline
        now = server.metrics().value("vllm:kv_offload_store_bytes_total")
        calm = calm + 1 if now == last else 0
        last = now
        time.sleep(0.1)


def test_prompts_come_back_from_host_memory_with_the_same_answers(tmp_path: Path) -> None:
    texts = prompts()
    with serve(tmp_path, {"spec_name": "PDOffloadingSpec", "cpu_bytes_to_use": 512 * BLOCK_BYTES}) as server:
        first = [server.ask(text) for text in texts]
        settle(server)
        cold = server.computed()
        assert cold > 1.5 * KV_BLOCKS * BLOCK_TOKENS, "the prompts must not fit the KV cache"
        second = [server.ask(text) for text in texts]
        warm = server.metrics()
        assert_same(first, second)
        # Of each prompt only what follows its last whole block, and at most one block more, is computed again.
        assert server.computed() - cold <= PROMPTS * 2 * BLOCK_TOKENS
        assert warm.value("vllm:prompt_tokens_by_source_total", source="external_kv_transfer") >= 0.8 * cold
        assert warm.value("vllm:kv_offload_load_bytes_total") >= 0.8 * cold * BLOCK_BYTES / BLOCK_TOKENS
        # Several at once, so that loads, stores and preemptions overlap.
        with ThreadPoolExecutor(PROMPTS) as pool:
            assert_same(first, list(pool.map(server.ask, texts)))

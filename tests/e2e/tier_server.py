"""A real server with tiers, whose KV cache is too small for its prompts, and the prompts."""

from __future__ import annotations

import os
import random
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.e2e.ask import Answer, Endpoint, Prompt, compare
from tests.e2e.prompts import TEXTS
from vllm_pd.graph import metrics_text
from vllm_pd.graph.local import DEFAULT_START_DEADLINE_S
from vllm_pd.graph.metrics_text import Metrics
from vllm_pd.graph.ports import LOOPBACK, free_port
from vllm_pd.graph.process import ManagedProcess, ProcessSpec
from vllm_pd.kv_offload.ssd_config import ROOT_NAME

MODEL = "m"
BLOCK_TOKENS = 32
KV_BLOCKS = 72
"""On the GPU side: two long prompts."""
CPU_BLOCKS = 160
STEP_TOKENS = 256
CONCURRENCY = 8


@dataclass(frozen=True)
class Server:
    process: ManagedProcess
    endpoint: Endpoint
    log: Path

    def metrics(self) -> Metrics:
        return metrics_text.scrape(self.endpoint.url)

    def post(self, path: str) -> None:
        """To one of vLLM's endpoints for development, which answer with anything."""
        request = urllib.request.Request(self.endpoint.url + path, b"", method="POST")
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()

    def ask_all(self, prompts: Sequence[Prompt], at_once: int = CONCURRENCY) -> list[Answer]:
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(self.endpoint.ask, prompts))


@contextmanager
def serve(
    folder: Path,
    model: Path,
    *,
    block_bytes: int = 0,
    ssd: Path | None = None,
    options: Mapping[str, object] | None = None,
    args: Sequence[str] = (),
) -> Iterator[Server]:
    """A server; with tiers if a folder for the SSD tier is given.

    Args:
        block_bytes: of one block of KV, to size the tiers by.
        options: of the SSD tier.
        args: further ones of `vllm serve`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(model), "--served-model-name", MODEL]
    command += ["--host", LOOPBACK, "--port", str(port), "--max-model-len", "1536", "--enforce-eager"]
    command += ["--dtype", "float32", "--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(KV_BLOCKS)]
    command += ["--max-num-batched-tokens", str(STEP_TOKENS), "--max-num-seqs", str(CONCURRENCY)]
    command += ["--shutdown-timeout", "15", *args]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    env["VLLM_SERVER_DEV_MODE"] = "1"
    if ssd is not None:
        config = folder / "worker.yaml"
        settings = {
            "cpu_gib": CPU_BLOCKS * block_bytes / (1 << 30),
            "ssd_path": str(ssd),
            "ssd_gib": 1,
            # A tiny model computes faster than anything is loaded; here it is about the answers.
            "load_gate": "always",
            "tiers": {"ssd": {"free_gib": 0, "segment_mib": 16, **(options or {})}},
        }
        config.write_text(yaml.safe_dump(settings))
        command += ["--kv-connector", "pd", "--pd-config", str(config)]
    log = folder / "vllm.log"
    process = ManagedProcess(ProcessSpec("vllm", command, log, env))
    with process:
        process.wait_ready(f"http://{LOOPBACK}:{port}/health", deadline_s=DEFAULT_START_DEADLINE_S)
        yield Server(process, Endpoint(f"http://{LOOPBACK}:{port}", MODEL), log)
    assert not process.left_processes()
    assert not process.left_shared_memory()


def die(server: Server) -> None:
    """As by `kill -9`. The tier's shared memory goes with it; what else nobody could remove is removed here."""
    server.process.kill()
    left = server.process.left_shared_memory()
    assert not [path for path in left if "vllm_offload" in path]
    for path in left:
        Path(path).unlink()


def conversations(count: int, turns: int, seed: int = 5) -> list[Prompt]:
    """`count` conversations of `turns` prompts each, every prompt the one before and more; in a mixed order.

    Natural text, some 200 to 1,200 tokens, no two conversations alike from the first block on.
    """
    draw = random.Random(seed)
    texts = [TEXTS[name] for name in ("english", "german", "french", "emoji and code")]
    made: list[list[Prompt]] = []
    for number in range(count):
        body = f"Conversation {number}, kept on page {draw.randrange(10_000)}. "
        body += " ".join(draw.choice(texts) for _ in range(draw.randint(2, 6)))
        own = []
        for turn in range(turns):
            body += f" Turn {turn}: {draw.choice(texts)} Ship {draw.randrange(1000)} passed."
            own.append(Prompt(f"conversation {number}, turn {turn}", "completion", {"prompt": body}, max_tokens=8))
        made.append(own)
    # Turns of a conversation in their order, conversations mixed: what comes again comes after a while.
    waiting = [number for number in range(count) for _ in range(turns)]
    draw.shuffle(waiting)
    return [made[number].pop(0) for number in waiting]


def assert_same(prompts: Sequence[Prompt], wanted: Sequence[Answer], got: Sequence[Answer]) -> None:
    """Equal answers, or parted at a tie, of which there may be few."""
    verdicts = [compare(one, other) for one, other in zip(wanted, got, strict=True)]
    wrong = [(p.name, v.detail) for p, v in zip(prompts, verdicts, strict=True) if not v.equal and v.tie_at is None]
    assert wrong == []
    assert sum(v.tie_at is not None for v in verdicts) <= max(2, len(prompts) // 50)


def segment_files(ssd: Path) -> list[Path]:
    return sorted((ssd / ROOT_NAME).rglob("*.kv"))

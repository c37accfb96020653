"""A prefill worker, a decode worker and a router on this machine answer questions; `make demo` runs it.

    python -m scripts.demo [--keep]

Everything is a process of its own and ends with the demo, also on Ctrl-C at any moment. What each side computed
and what moved between them is read from the workers' own metrics.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.chat import Answer, ChatError, stream_chat
from scripts.models import ROOT, ModelError, smollm2_dir
from vllm_pd.errors import PDError
from vllm_pd.graph import machine
from vllm_pd.graph.local import LocalCluster
from vllm_pd.graph.metrics_text import Metrics
from vllm_pd.interrupts import Interrupted, Interrupts
from vllm_pd.status_line import StatusLine

MODEL_NAME = "smollm2"
MAX_TOKENS = 80
# A GPU compiles kernels at its first start.
START_DEADLINE_S = 900.0
SETTLE_S = 5.0
PASSAGE = Path(__file__).with_name("demo_passage.txt")

PROMPT_TOKENS = "vllm:prompt_tokens_by_source_total"
NIXL_BYTES = "vllm:nixl_bytes_transferred_sum"


class DemoError(Exception):
    """The demo cannot go on; one sentence."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one worker did with prompts since it started, in tokens, and the bytes it read over NIXL."""

    computed: int
    cached: int
    received: int
    nixl_bytes: int

    @classmethod
    def of(cls, metrics: Metrics) -> Work:
        """Read it from the worker's `/metrics`."""
        return cls(
            computed=int(metrics.value(PROMPT_TOKENS, source="local_compute")),
            cached=int(metrics.value(PROMPT_TOKENS, source="local_cache_hit")),
            received=int(metrics.value(PROMPT_TOKENS, source="external_kv_transfer")),
            nixl_bytes=int(metrics.value(NIXL_BYTES)),
        )

    @property
    def tokens(self) -> int:
        return self.computed + self.cached + self.received

    def since(self, before: Work) -> Work:
        return Work(
            self.computed - before.computed,
            self.cached - before.cached,
            self.received - before.received,
            self.nixl_bytes - before.nixl_bytes,
        )


class Demo:
    """One run: a cluster that is up, and the questions put to it."""

    def __init__(self, cluster: LocalCluster, interrupts: Interrupts) -> None:
        self._cluster = cluster
        self._interrupts = interrupts

    def ask(self, title: str, question: str, *, context: str = "") -> None:
        """Stream one answer to the terminal, then show who computed what."""
        before = self._work()
        print(f"\n{title}\n  Question: {question}\n  Answer:   ", end="", flush=True)
        content = f"{context}\n\nQuestion: {question}" if context else question
        with self._interrupts.anywhere():
            answer = stream_chat(self._cluster.router_url, MODEL_NAME, content, MAX_TOKENS, _print_piece)
        if not answer.text.strip():
            raise DemoError(f"The router sent an empty answer; the logs are in {self._cluster.log_dir}.")
        cut = " ..." if answer.finish_reason == "length" else ""
        print(
            f"{cut}\n  ({answer.prompt_tokens} prompt tokens, first word after {answer.first_s:.2f} s, "
            f"{answer.completion_tokens} tokens in {answer.total_s:.1f} s)"
        )
        self._show_work(before, answer)

    def _work(self) -> dict[str, Work]:
        return {worker.name: Work.of(worker.metrics()) for worker in self._cluster.workers}

    def _show_work(self, before: dict[str, Work], answer: Answer) -> None:
        deadline = time.monotonic() + SETTLE_S
        while True:
            self._interrupts.check()
            work = {name: now.since(before[name]) for name, now in self._work().items()}
            # A worker counts a prompt when its first token is out, and the scrape may come before that.
            if all(done.tokens >= answer.prompt_tokens for done in work.values()) or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        print(f"\n  {'prompt tokens':<14}{'computed':>10}{'own cache':>12}{'received':>10}   over NIXL")
        for name, done in work.items():
            moved = f"{done.nixl_bytes / 1e6:.2f} MB" if done.nixl_bytes else "-"
            print(f"  {name:<14}{done.computed:>10}{done.cached:>12}{done.received:>10}   {moved}")
        if not any(done.nixl_bytes for done in work.values()):
            raise DemoError(f"No KV moved over NIXL for this question; the logs are in {self._cluster.log_dir}.")


def _print_piece(piece: str) -> None:
    print(piece.replace("\n", "\n            "), end="", flush=True)


def start(cluster: LocalCluster, interrupts: Interrupts) -> None:
    """Bring everything up, with progress."""
    status = StatusLine("Store, prefill worker, decode worker, router")

    def progress(waited: float, names: Sequence[str]) -> None:
        if interrupts.count:
            status.done("not finished, stopping; Ctrl-C again kills")
        interrupts.check()
        status.show(f"waiting for {', '.join(names)}" if names else "workers are up")

    cluster.start(progress=progress, deadline_s=START_DEADLINE_S, hurry=lambda: interrupts.count > 1)
    status.done("up")
    for worker in cluster.workers:
        print(f"    {worker.name:<10} {worker.url}  process {worker.process.pid}")
    print(f"    {'router':<10} {cluster.router_url}  process {cluster.router.pid if cluster.router else 0}")
    print(f"    {'store':<10} {cluster.store_url}  process {cluster.store.pid if cluster.store else 0}")


def keep(cluster: LocalCluster, interrupts: Interrupts) -> None:
    """Stay until Ctrl-C. Raises DemoError when a process dies meanwhile."""
    body = json.dumps({"model": MODEL_NAME, "stream": True, "messages": [{"role": "user", "content": "Who are you?"}]})
    print("\nEverything keeps running until Ctrl-C. Try:\n")
    print(
        f"  curl -N {cluster.router_url}/v1/chat/completions -H 'Content-Type: application/json' \\\n    -d '{body}'\n"
    )
    processes = [worker.process for worker in cluster.workers] + ([cluster.router] if cluster.router else [])
    while not interrupts.count:
        for process in processes:
            if not process.is_running:
                raise DemoError(f"{process.spec.name} ended by itself; its log is {process.spec.log}.")
        time.sleep(0.2)


def run(interrupts: Interrupts, *, keep_running: bool) -> None:
    """The whole demo. Raises DemoError, PDError, ModelError, ChatError or Interrupted, with everything ended."""
    here = machine.detect()
    what = f"{len(here.gpus)} GPU(s)" if here.has_gpu else f"{len(here.cores)} CPU cores, no GPU"
    log_dir = ROOT / "logs" / time.strftime("demo-%Y%m%d-%H%M%S")
    print(f"vllm-pd on this machine ({what}); logs are in {log_dir}")

    status = StatusLine("Model SmolLM2-135M-Instruct")
    with interrupts.anywhere():
        model = smollm2_dir()
    status.done("ready")

    cluster = LocalCluster(
        model=model,
        prefill=1,
        decode=1,
        worker_args=["--served-model-name", MODEL_NAME],
        # One question at a time is soonest answered by one worker; the demo is to show two.
        router_args=["--disagg", "always"],
        log_dir=log_dir,
        on=here,
    )
    with contextlib.ExitStack() as ended:
        ended.callback(cluster.stop)
        # The first to run; the one above is for the case that the terminal is gone and printing fails.
        ended.callback(stop, cluster, interrupts)
        start(cluster, interrupts)
        demo = Demo(cluster, interrupts)
        demo.ask("1. A question", "Why is the sky blue? Explain it in two sentences.")
        passage = PASSAGE.read_text(encoding="utf-8").strip()
        demo.ask("2. A question about a text", "Who was the builder of the lighthouse?", context=passage)
        demo.ask("3. Another one about the same text", "Where is the book of Samuel today?", context=passage)
        if keep_running:
            keep(cluster, interrupts)


def stop(cluster: LocalCluster, interrupts: Interrupts) -> None:
    """End everything; a Ctrl-C after the one that led here makes it quick."""
    expected = max(interrupts.count, 1)
    print()
    status = StatusLine("Ending router, workers and store")
    cluster.stop(hurry=lambda: interrupts.count > expected)
    # Looked at again, because what killed workers leave in shared memory is removed by `stop`.
    left = cluster.leftovers()
    status.done("nothing left behind" if not left else f"left behind: {left}")
    print(f"  The logs are in {cluster.log_dir}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.demo", description="A whole cluster answers questions.")
    parser.add_argument("--keep", action="store_true", help="keep everything running until Ctrl-C")
    args = parser.parse_args(argv)
    with Interrupts() as interrupts:
        try:
            run(interrupts, keep_running=args.keep)
        except Interrupted:
            print("Stopped.")
            return 130
        except (DemoError, ChatError, ModelError, PDError) as e:
            print(f"\nThe demo failed: {e}", file=sys.stderr)
            return 1
        except BrokenPipeError:
            # Nobody reads any more; what Python still holds back must not raise once again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

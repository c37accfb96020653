"""A prefill worker, a decode worker and a router on this machine answer questions; `make demo` runs it.

    python -m scripts.demo [--keep]

It is a graph like those in `configs/`, made in Python: `vllm-pd status` and `logs` work for it too. Everything is a
process of its own and ends with the demo, also on Ctrl-C at any moment. What each side computed and what moved between
them is read from the workers' own metrics.
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
from scripts.models import ModelError, smollm2_dir
from vllm_pd.errors import GraphError, PDError
from vllm_pd.graph import control, launcher, machine, metrics_text
from vllm_pd.graph.check import check
from vllm_pd.graph.control import Stop
from vllm_pd.graph.launcher import Cluster
from vllm_pd.graph.machine import Machine
from vllm_pd.graph.metrics_text import Metrics
from vllm_pd.graph.model import Decode, Frontend, Graph, Prefill, RestartRule, Router
from vllm_pd.graph.status import GraphStatus, Phase
from vllm_pd.graph.watcher import Watcher
from vllm_pd.interrupts import Interrupted, Interrupts
from vllm_pd.status_line import StatusLine

MODEL_NAME = "smollm2"
MAX_TOKENS = 80
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

    def __init__(self, cluster: GraphStatus, interrupts: Interrupts) -> None:
        self._cluster = cluster
        self._interrupts = interrupts

    def ask(self, title: str, question: str, *, context: str = "") -> None:
        """Stream one answer to the terminal, then show who computed what."""
        before = self._work()
        print(f"\n{title}\n  Question: {question}\n  Answer:   ", end="", flush=True)
        content = f"{context}\n\nQuestion: {question}" if context else question
        with self._interrupts.anywhere():
            answer = stream_chat(self._cluster.url, MODEL_NAME, content, MAX_TOKENS, _print_piece)
        if not answer.text.strip():
            raise DemoError(f"The router sent an empty answer; the logs are in {self._cluster.logs}.")
        cut = " ..." if answer.finish_reason == "length" else ""
        print(
            f"{cut}\n  ({answer.prompt_tokens} prompt tokens, first word after {answer.first_s:.2f} s, "
            f"{answer.completion_tokens} tokens in {answer.total_s:.1f} s)"
        )
        self._show_work(before, answer)

    def _work(self) -> dict[str, Work]:
        workers = [i for i in self._cluster.instances if i.component in ("prefill", "decode")]
        return {worker.name: Work.of(metrics_text.scrape(worker.url)) for worker in workers}

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
            raise DemoError(f"No KV moved over NIXL for this question; the logs are in {self._cluster.logs}.")


def _print_piece(piece: str) -> None:
    print(piece.replace("\n", "\n            "), end="", flush=True)


def demo_graph(model: str, here: Machine) -> Graph:
    """One worker that prefills, one that decodes, a router that always has prompts prefilled, a store."""
    # A GPU that is alone is shared.
    gpus = 0.5 if len(here.gpus) == 1 else 1
    served = ("--served-model-name", MODEL_NAME, "--max-model-len", "2048")
    return check(
        Frontend(port=0)
        # One question at a time is soonest answered by one worker; the demo is to show two.
        .link(Router(settings={"disagg": "always"}))
        .link(Decode(1, args=served, gpus=gpus))
        .link(Prefill(1, args=served, gpus=gpus))
        # Whoever tries something out wants to see at once what is wrong.
        .graph("demo", model=model, restart=RestartRule(tries=0))
    )


def start(cluster: Cluster, interrupts: Interrupts) -> GraphStatus:
    """Wait until everything is up, with progress. Raises DemoError when something is not."""
    watcher = Watcher("Store, prefill worker, decode worker, router")

    def watch(status: GraphStatus) -> None:
        if interrupts.count:
            watcher.done("not finished, stopping; Ctrl-C again kills")
        interrupts.check()
        watcher(status)
        # The others need not be waited for.
        if any(i.phase is Phase.GIVEN_UP for i in status.instances):
            raise DemoError("\n".join(launcher.failures(status)))

    status = launcher.wait_until_up(cluster.folder, watch=watch)
    watcher.done("up")
    for i in status.instances:
        print(f"    {i.name:<11} {i.url}  process {i.pid}")
    return status


def keep(cluster: Cluster, status: GraphStatus, interrupts: Interrupts) -> None:
    """Stay until Ctrl-C, or until the graph is ended from elsewhere."""
    body = json.dumps({"model": MODEL_NAME, "stream": True, "messages": [{"role": "user", "content": "Who are you?"}]})
    print("\nEverything keeps running until Ctrl-C. Try:\n")
    print(f"  curl -N {status.url}/v1/chat/completions -H 'Content-Type: application/json' \\\n    -d '{body}'\n")
    print("  vllm-pd status; vllm-pd logs -f; vllm-pd scale decode=2\n")
    watcher = Watcher("")
    watcher.skip(status)
    while not interrupts.count and cluster.supervisor.poll() is None:
        with contextlib.suppress(GraphError):
            watcher.news(cluster.status())
        time.sleep(0.2)


def run(interrupts: Interrupts, *, keep_running: bool) -> None:
    """The whole demo. Raises DemoError, PDError, ModelError, ChatError or Interrupted, with everything ended."""
    here = machine.detect()
    print(f"vllm-pd on this machine ({here})")

    status_line = StatusLine("Model SmolLM2-135M-Instruct")
    with interrupts.anywhere():
        model = smollm2_dir()
    status_line.done("ready")

    cluster = launcher.start(demo_graph(str(model), here))
    print(f"  The logs are in {cluster.folder.logs}")
    with contextlib.ExitStack() as ended:
        ended.callback(cluster.leave_alone)
        ended.callback(stop, cluster, interrupts)
        status = start(cluster, interrupts)
        demo = Demo(status, interrupts)
        demo.ask("1. A question", "Why is the sky blue? Explain it in two sentences.")
        passage = PASSAGE.read_text(encoding="utf-8").strip()
        demo.ask("2. A question about a text", "Who was the builder of the lighthouse?", context=passage)
        demo.ask("3. Another one about the same text", "Where is the book of Samuel today?", context=passage)
        if keep_running:
            keep(cluster, status, interrupts)


def stop(cluster: Cluster, interrupts: Interrupts) -> None:
    """End everything; a Ctrl-C after the one that led here makes it quick."""
    expected = max(interrupts.count, 1)

    def watch(status: GraphStatus) -> None:
        if interrupts.count > expected:
            with contextlib.suppress(GraphError):
                control.ask(cluster.folder, Stop(now=True))

    print()
    status_line = StatusLine("Ending router, workers and store")
    left = launcher.stop(cluster.folder, watch=watch)
    status_line.done(f"left behind: {left}" if left else "nothing left behind")
    print(f"  The logs are in {cluster.folder.logs}")


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

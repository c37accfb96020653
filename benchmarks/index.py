"""The block index: from KV events of engines to the mirror of a router, through a real store.

Agents are processes of their own; each takes event messages as vLLM encodes them (64 blocks stored in place of 64
removed ones: its cache is full from the start), keeps the truth, and writes the index. The mirror is one process with a
router's own code. A change is one block stored or removed. Achieved counts until the mirror has applied the last change
(drain included); the columns in microseconds are CPU time per change. ZMQ between engine and agent is left out.
Everything shares the machine.

Then the lookup of a prompt of 384 blocks in the mirror, and what a block costs in the store and in the mirror.
"""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.common import Report, Target, cpu_seconds, parse_arguments, percentile, progress
from benchmarks.index_processes import MESSAGE_BLOCKS, NAMESPACE, POOL
from vllm_pd.block_hash import KEY_BYTES
from vllm_pd.graph.embedded_store import EmbeddedStore
from vllm_pd.routing.prefix_index import PrefixIndex
from vllm_pd.state import Holder, WorkerId, open_block_index

CACHE_BLOCKS = 10_000
PROMPT_BLOCKS = 384
CHANGES_PER_S = 300_000.0
LOOKUP_US = 60.0
STORE_BYTES = 30.0
MIRROR_BYTES = 100.0
TOO_MUCH = 0.7
"""Part of the offered speed below which more is not offered."""


def flow(agents: int, offered: float, seconds: float) -> dict[str, Any]:
    """Changes through the whole chain.

    Args:
        offered: changes per second, all agents together.
        seconds: how long they are offered.
    """
    per_message = 2 * MESSAGE_BLOCKS
    count = max(50, int(offered * seconds / agents / per_message))
    with ExitStack() as stack:
        store = stack.enter_context(EmbeddedStore())
        workers = [
            stack.enter_context(
                _Child(
                    "agent",
                    url=store.url,
                    number=number,
                    messages=count,
                    cache_blocks=CACHE_BLOCKS,
                    per_s=offered / agents / per_message,
                )
            )
            for number in range(agents)
        ]
        for each in workers:
            each.wait_ready()
        mirror = stack.enter_context(_Child("mirror", url=store.url, agents=agents))
        mirror.wait_ready()
        cpu, begin = cpu_seconds(store.pid), time.monotonic() + 0.5
        for each in workers:
            each.say(str(begin))
        seen = mirror.result()
        cpu = cpu_seconds(store.pid) - cpu
        for each in workers:
            each.say("")
        results = [each.result() for each in workers]
        stats = uvloop.run(_stats(store.url))
    changes = sum(result["changes"] for result in results)
    delays = [at - results[number]["times"][n] for number, n, at in seen["seen"]]
    took = seen["ended"] - begin
    return {
        "agents": agents,
        "offered_per_s": offered,
        # Less than was offered where an agent cannot take it in that fast.
        "taken_per_s": changes / (max(result["handed_over"] for result in results) - begin),
        "achieved_per_s": changes / took,
        # Less than was achieved where a change was overtaken by a newer one of the same block and never written.
        "applied_per_s": seen["blocks"] / took,
        "delay_p50_ms": percentile(delays, 50) * 1e3 if delays else None,
        "delay_p99_ms": percentile(delays, 99) * 1e3 if delays else None,
        "agent_us": sum(result["cpu_s"] for result in results) / changes * 1e6,
        "store_us": cpu / changes * 1e6,
        "mirror_us": seen["cpu_s"] / changes * 1e6,
        "announced": sum(result["announced"] for result in results),
        "changes_per_write": changes / max(1, sum(result["writes"] for result in results)),
        "store_bytes": sum(c.memory_bytes for c in stats.caches) / max(1, sum(c.distinct for c in stats.caches)),
        "right": seen["complete"] and all(seen["held"][str(n)] == r["held"] for n, r in enumerate(results)),
    }


async def _stats(url: str) -> Any:
    index = open_block_index(url, NAMESPACE, timeout_s=10.0)
    try:
        return await index.stats(POOL)
    finally:
        await index.close()


class _Child:
    """A process of `benchmarks.index_processes`."""

    def __init__(self, role: str, **options: Any) -> None:
        self._role = role
        command = [sys.executable, "-m", "benchmarks.index_processes", role, json.dumps(options)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def wait_ready(self) -> None:
        if self._line() != "ready":
            raise RuntimeError(f"the {self._role} process ended before it was ready")

    def say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def result(self) -> dict[str, Any]:
        line = self._line()
        if not line:
            raise RuntimeError(f"the {self._role} process ended without a result")
        found: dict[str, Any] = json.loads(line)
        return found

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def lookups(workers: int, rounds: int) -> list[dict[str, Any]]:
    """Looking a prompt of 384 blocks up, and the mirror's memory.

    Every worker holds 10,000 blocks: prompts of its own behind a beginning of 64 blocks that all workers hold. `one`:
    a prompt of one of them. `staggered`: a prompt of which each worker holds another length, the worst case. `all`: a
    prompt that every worker holds whole. `none`: an unknown one.
    """
    chance = random.Random(1)

    def keys(count: int) -> list[bytes]:
        noise = chance.randbytes(count * KEY_BYTES)
        return [noise[at : at + KEY_BYTES] for at in range(0, len(noise), KEY_BYTES)]

    gc.collect()
    before = _resident()
    index = PrefixIndex()
    common, staggered, everywhere = keys(64), keys(PROMPT_BLOCKS), keys(PROMPT_BLOCKS)
    one: list[bytes] = []
    held = 0
    for number in range(workers):
        holder = Holder(WorkerId(f"10.0.0.{number}:8000"))
        index.add(holder)
        own = [common, everywhere, staggered[: PROMPT_BLOCKS * (number + 1) // workers]]
        while (left := CACHE_BLOCKS - sum(map(len, own))) > 0:
            own.append(keys(min(left, PROMPT_BLOCKS - len(common))))
        one = common + own[-2]
        index.apply(holder, {1: b"".join(map(b"".join, own))})
        held += CACHE_BLOCKS
    gc.collect()
    memory = (_resident() - before) / held
    rows = []
    for name, prompt in {"one": one, "staggered": staggered, "all": everywhere, "none": keys(PROMPT_BLOCKS)}.items():
        times = []
        for _ in range(rounds):
            began = time.perf_counter()
            for _ in range(100):
                index.lookup(prompt)
            times.append((time.perf_counter() - began) / 100)
        rows.append(
            {
                "workers": workers,
                "prompt": name,
                "holders": len(index.lookup(prompt)),
                "lookup_us": min(times) * 1e6,
                "lookup_p50_us": percentile(times, 50) * 1e6,
                "mirror_bytes": memory,
            }
        )
    return rows


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def targets(flows: Sequence[dict[str, Any]], found: Sequence[dict[str, Any]]) -> list[Target]:
    """What must be reached."""
    sixteen = [row["applied_per_s"] for row in flows if row["agents"] == 16 and row["right"]]
    title = "16 agents: changes applied in the mirror per second, drain included"
    out = [
        Target.at_least(title, max(sixteen, default=None), CHANGES_PER_S),
        Target.at_least("runs that ended with index and mirror right", sum(row["right"] for row in flows), len(flows)),
        Target.at_most("bytes per block and worker in the store", max(r["store_bytes"] for r in flows), STORE_BYTES),
        Target.at_most("bytes per block and worker in the mirror", max(r["mirror_bytes"] for r in found), MIRROR_BYTES),
    ]
    for row in found:
        if row["prompt"] == "one":
            title = f"lookup of {PROMPT_BLOCKS} blocks, {row['workers']} workers: microseconds"
            out.append(Target.at_most(title, row["lookup_us"], LOOKUP_US))
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Run it. Returns 0 when every target was reached, else 1."""
    arguments = parse_arguments("events of engines to the mirror of a router, and lookups in it", argv)
    seconds = 2.0 if arguments.quick else 5.0
    speeds = (150e3, 300e3, 450e3) if arguments.quick else (100e3, 200e3, 300e3, 400e3, 500e3)
    report = Report("index")
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > cores / 2:
        report.notes.append(f"other programs were busy (load average {load:.1f} on {cores} cores): figures are too low")
    # First, while this process is small: its memory is measured.
    found = [row for workers in (8, 64) for row in lookups(workers, 30 if arguments.quick else 100)]
    flows: list[dict[str, Any]] = []
    for agents in (1, 16):
        best = 0.0
        for offered in speeds:
            flows.append(flow(agents, offered, seconds))
            achieved = flows[-1]["achieved_per_s"]
            progress(f"{agents} agents, offered {offered:,.0f}/s: achieved {achieved:,.0f}/s")
            best = max(best, achieved)
            if achieved < TOO_MUCH * offered:
                break
        flows.append(flow(agents, best / 2, seconds))
        progress(f"{agents} agents, half load: delay p50 {flows[-1]['delay_p50_ms']:.1f} ms")
    report.results = flows + found
    report.targets = targets(flows, found)
    report.show(as_json=arguments.json)
    return 0 if all(target.ok for target in report.targets) else 1


if __name__ == "__main__":
    sys.exit(main())

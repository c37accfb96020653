"""What a miss costs, and from which length on a hit is worth its load.

The first is throughput of prompts that nobody asked for before, which tiers can only be in the way of: a server without
them, one with ours, and those of the peers are all up, those that are not asked are stopped (SIGSTOP), and they take
turns in rounds whose order rotates. What a batch leaves to be written is written before the next one's turn: not in
the batch's time, as it would not be in a user's, but in its processor time. To see one percent in wall-clock time takes
hundreds of turns on a small machine with neighbours. A few show what tiers add to the scheduler's thread, which here
computes in turn with the model, and to all threads beside those two.

The second is TTFT of prompts of many lengths, computed, from host memory and from the disk, with a gate that loads
whatever it costs; beside it is what the same server's gate would have decided.
"""

from __future__ import annotations

import operator
import os
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.common import Target, median_interval, progress, scratch_folder
from benchmarks.offload_peers import DTYPE, NOTHING, OURS, CpuSeconds, Sizes, System, installed, running
from benchmarks.offload_ttft import COLD, DISK, MEMORY, came_from
from benchmarks.pd_ttft import SETTLE_S, Side, prompt, time_to_first_token
from scripts.models import tiny_model_dir
from vllm_pd.sim.kv_bytes import kv_bytes_per_token

NAME = "What a miss costs, and from which length on a hit pays"

SIZES = Sizes(memory=256 << 20, block_tokens=32, gpu_blocks=448, max_model_len=2560)
AT_ONCE = 8
TOKENS = 1500
BATCH, ROUNDS = 16, 24
QUICK_BATCH, QUICK_ROUNDS = 8, 3
STARTS_AT_ONCE = 2
"""Of servers: a start computes on one core for most of its time."""
THROUGHPUT = 0.99

LENGTHS = (64, 96, 160, 256, 384, 512, 1024, 2048)
QUICK_LENGTHS = (64, 256, 1024)
PROMPTS, QUICK_PROMPTS = 9, 3
WARM_UP_LENGTHS = (100, 400, 1500)
BELIEF = 4.0
"""What the gate's break-even may differ from the measured one by: lengths are measured in steps of up to two."""

Seconds = dict[tuple[int, str], list[float]]
"""By prompt length and where it came from."""


def run(quick: bool) -> tuple[list[dict[str, Any]], list[Target]]:
    """Both measurements."""
    names = [NOTHING, *installed()]
    with tempfile.TemporaryDirectory(prefix="offload-", dir=scratch_folder()) as scratch, ExitStack() as stack:
        progress(f"starting {len(names)} servers: {', '.join(names)}")
        model = tiny_model_dir()

        def start(name: str) -> System:
            # What ours loads is measured whatever it costs.
            gate = {"load_gate": "always"} if name == OURS else {}
            return stack.enter_context(running(name, model, SIZES, Path(scratch), **gate))

        with ThreadPoolExecutor(STARTS_AT_ONCE) as pool:
            systems = dict(zip(names, pool.map(start, names), strict=True))
        sides = {name: Side(system.url, system.groups) for name, system in systems.items()}
        for side in sides.values():
            stack.callback(side.wake)
        token_bytes = kv_bytes_per_token(model, DTYPE)
        rows, targets = _throughput(systems, sides, token_bytes, quick)
        sides[OURS].wake()
        more_rows, more_targets = _break_even(systems[OURS], token_bytes, quick)
    return rows + more_rows, targets + more_targets


def _throughput(
    systems: Mapping[str, System], sides: Mapping[str, Side], token_bytes: int, quick: bool
) -> tuple[list[dict[str, Any]], list[Target]]:
    """Leaves all of them stopped."""
    rng = random.Random(3)
    batch, rounds = (QUICK_BATCH, QUICK_ROUNDS) if quick else (BATCH, ROUNDS)
    taken: dict[str, list[float]] = {name: [] for name in systems}
    worked: dict[str, list[CpuSeconds]] = {name: [] for name in systems}
    written: dict[str, list[int]] = {name: [] for name in systems}
    # Host memory is filled once, by pages that the kernel has to provide, and then turned over for ever.
    filling = SIZES.memory // (TOKENS * token_bytes) + AT_ONCE
    for name, system in systems.items():
        progress(f"filling host memory: {name}")
        _batch(system.url, [prompt(rng, TOKENS) for _ in range(filling)])
        _settle(system)
        sides[name].pause()
    names = list(systems)
    for number in range(rounds):
        progress(f"round {number + 1} of {rounds}")
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            system = systems[name]
            sides[name].wake()
            # A moment to catch up with their clocks.
            time.sleep(SETTLE_S)
            cpu, disk = system.cpu_seconds(), system.disk_bytes()[1]
            taken[name].append(_batch(system.url, [prompt(rng, TOKENS) for _ in range(batch)]))
            _settle(system)
            worked[name].append(CpuSeconds(*map(operator.sub, system.cpu_seconds(), cpu)))
            written[name].append(system.disk_bytes()[1] - disk)
            if loaded := system.loaded_tokens():
                raise SystemExit(f"{name}: {loaded:.0f} tokens of new prompts came from the tiers.")
            sides[name].pause()
    ratios = {name: [a / b for a, b in zip(taken[NOTHING], seconds, strict=True)] for name, seconds in taken.items()}
    over = {name: round(statistics.median(each), 4) for name, each in ratios.items()}
    rows = [
        {
            "server": name,
            "prompts": batch * rounds,
            "tokens": TOKENS,
            "at once": AT_ONCE,
            "tokens/s p50": round(batch * TOKENS / statistics.median(seconds)),
            "tokens/s min": round(batch * TOKENS / max(seconds)),
            "tokens/s max": round(batch * TOKENS / min(seconds)),
            f"over {NOTHING} p50": over[name],
            "interval of p50": "{:.3f}-{:.3f}".format(*median_interval(ratios[name])),
            "CPU ms a prompt": round(statistics.median(each.total for each in worked[name]) / batch * 1e3, 1),
            "scheduler ms a prompt": round(statistics.median(each.scheduler for each in worked[name]) / batch * 1e3, 2),
            "beside ms a prompt": round(statistics.median(each.beside for each in worked[name]) / batch * 1e3, 2),
            "MB to disk a prompt": round(statistics.median(written[name]) / batch / 1e6, 2),
        }
        for name, seconds in taken.items()
    ]
    peer = max(over[name] for name in systems if name not in (OURS, NOTHING))
    return rows, [
        Target.at_least("throughput of new prompts with tiers over without", over[OURS], THROUGHPUT),
        Target.at_least("throughput of new prompts over the faster peer's", round(over[OURS] / peer, 4), 1.0),
    ]


def _settle(system: System) -> None:
    """Until what it stores is on the disk, not only on its way there: the next one is not to be measured beside it."""
    system.settle()
    os.sync()


def _batch(url: str, prompts: Sequence[list[int]]) -> float:
    """Seconds to answer all, some at once."""
    started = time.perf_counter()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda ids: time_to_first_token(url, ids), prompts))
    return time.perf_counter() - started


def _break_even(system: System, token_bytes: int, quick: bool) -> tuple[list[dict[str, Any]], list[Target]]:
    rng = random.Random(4)
    lengths = QUICK_LENGTHS if quick else LENGTHS
    each = QUICK_PROMPTS if quick else PROMPTS
    # What was asked for twice stays in host memory for long, so those from the disk are asked for once before.
    on_disk = [prompt(rng, length) for length in lengths for _ in range(each)]
    found: Seconds = {}
    ask = _Asker(system, token_bytes, found)
    progress("how fast it loads is learned")
    for length in WARM_UP_LENGTHS:
        ids = prompt(rng, length)
        for _ in range(4):
            time_to_first_token(system.url, ids)
            system.settle()
            system.forget()
    progress("computed, for the disk")
    for ids in on_disk:
        ask(ids, COLD)
        # First-time blocks are written where the drive has time for them.
        system.settle()
    for _ in range(3 * SIZES.memory // (2000 * token_bytes)):
        time_to_first_token(system.url, prompt(rng, 2000))
    system.settle()
    system.forget()
    progress("from the disk")
    for ids in on_disk:
        ask(ids, DISK)
    progress("computed, and from host memory")
    for length in lengths:
        # Those of all lengths do not fit.
        in_memory = [prompt(rng, length) for _ in range(each)]
        for ids in in_memory:
            ask(ids, COLD)
        system.settle()
        system.forget()
        for ids in in_memory:
            ask(ids, MEMORY)
    metrics = system.worker.metrics()
    believed = {
        kind: metrics.value("vllm_pd_offload_break_even_tokens", tier=tier) or None for kind, tier in _TIERS.items()
    }
    return _rows(found), _targets(found, believed)


_TIERS = {MEMORY: "cpu", DISK: "ssd"}


class _Asker:
    """Asks, and keeps the time of answers that came from where they should."""

    def __init__(self, system: System, token_bytes: int, found: Seconds) -> None:
        self._system = system
        self._token_bytes = token_bytes
        self._found = found

    def __call__(self, ids: list[int], kind: str) -> None:
        system = self._system
        loaded, read = system.loaded_tokens(), system.disk_bytes()[0]
        seconds = time_to_first_token(system.url, ids)
        # The last block is always computed, and of a short prompt that is much.
        loadable = (len(ids) - 1) // SIZES.block_tokens * SIZES.block_tokens
        share = (system.loaded_tokens() - loaded) / loadable
        from_disk = (system.disk_bytes()[0] - read) / (loadable * self._token_bytes)
        if came_from(share, from_disk) == kind:
            self._found.setdefault((len(ids), kind), []).append(seconds)


def _rows(found: Mapping[tuple[int, str], Sequence[float]]) -> list[dict[str, Any]]:
    rows = []
    for length in sorted({length for length, _ in found}):
        row: dict[str, Any] = {"tokens": length}
        for kind in (COLD, MEMORY, DISK):
            seconds = found.get((length, kind), [])
            row[f"{kind} p50 ms"] = round(statistics.median(seconds) * 1e3, 2) if seconds else None
            row[f"{kind} answers"] = len(seconds)
        rows.append(row)
    return rows


def break_even(found: Mapping[tuple[int, str], Sequence[float]], kind: str) -> int | None:
    """Shortest measured length from which on all lengths are faster so than computed; None for none."""
    shortest = None
    for length in sorted({length for length, _ in found}, reverse=True):
        cold, hit = found.get((length, COLD)), found.get((length, kind))
        if not cold or not hit or statistics.median(hit) >= statistics.median(cold):
            break
        shortest = length
    return shortest


def _targets(found: Seconds, believed: Mapping[str, float | None]) -> list[Target]:
    targets = []
    for kind in (MEMORY, DISK):
        measured, belief = break_even(found, kind), believed[kind]
        longest = max((length for length, _ in found), default=0)
        targets.append(Target.at_most(f"break-even of a {kind}, tokens", measured, longest))
        apart = max(measured / belief, belief / measured) if measured and belief else None
        targets.append(
            Target.at_most(
                f"gate's break-even of a {kind} ({belief or 0:.0f} tokens) and the measured one, ratio",
                None if apart is None else round(apart, 2),
                BELIEF,
            )
        )
    return targets

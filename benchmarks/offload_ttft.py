"""Time to first token when the prompt's blocks are nowhere, in host memory, on the disk, on the disk after a restart.

Our tiers, vLLM's own tiering and LMCache, one after the other on the same machine, with the same model, prompts and
size of host memory. Files are taken out of the page cache before they are read, so "disk" means the disk. Where a
prompt came from is not assumed but counted: prompt tokens that were not computed, and bytes that the system's
processes read from disks meanwhile. An answer that came from elsewhere is not in a row's times, but in its `strays`.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import Target, progress, scratch_folder
from benchmarks.offload_peers import DTYPE, OURS, Sizes, System, installed, running
from benchmarks.pd_ttft import prompt, time_to_first_token
from scripts.models import tiny_model_dir
from vllm_pd.sim.kv_bytes import kv_bytes_per_token

NAME = "TTFT from each tier, against vLLM's tiering and LMCache"

COLD, MEMORY, DISK, RESTARTED = "cold", "CPU hit", "SSD hit", "SSD hit after restart"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked: of each length (tokens) so many prompts, and once more after a restart or not.

    The GPU-side cache holds one prompt of 8192 tokens; `memory` (bytes) holds one of each length and less than all.
    """

    lengths: tuple[int, ...]
    prompts: int
    memory: int
    restart: bool

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.memory, block_tokens=32, gpu_blocks=288, max_model_len=8192)


FULL = Plan((1500, 4000, 8000), prompts=5, memory=128 << 20, restart=True)
QUICK = Plan((1500,), prompts=3, memory=64 << 20, restart=False)
"""Medians of three: it shows that all works, and differences of a multiple."""

NOISE = 1.15
"""What two medians of the same may differ by on a small machine: ours may be that much slower and count as equal."""
HIT_SHARE = 0.9
"""Of a prompt's tokens; the last block and what does not fill a peer's chunk are always computed."""
WORTH = 0.6
"""A hit of ours must take less than this part of computing."""


@dataclass(slots=True)
class Times:
    """Of one system, length and kind: seconds of the answers that came from where they should, and how many did not."""

    seconds: list[float] = field(default_factory=list)
    strays: int = 0

    @property
    def median(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds else None


Measured = dict[tuple[str, int, str], Times]


def run(quick: bool) -> tuple[list[dict[str, Any]], list[Target]]:
    """Measure every system that is installed. `quick`: see `QUICK`; the three servers' starts are most of its time."""
    plan = QUICK if quick else FULL
    found: Measured = {}
    names = installed()
    model = tiny_model_dir()
    with tempfile.TemporaryDirectory(prefix="offload-", dir=scratch_folder()) as scratch:
        for name in names:
            _measure(name, model, Path(scratch), plan, found)
    return rows(found), targets(found, names, plan.lengths)


def _measure(name: str, model: Path, place: Path, plan: Plan, found: Measured) -> None:
    """All kinds of one system. Every system gets the same prompts."""
    rng = random.Random(11)
    prompts = {length: [prompt(rng, length) for _ in range(plan.prompts)] for length in plan.lengths}
    token_bytes = kv_bytes_per_token(model, DTYPE)
    asker = _Asker(name, token_bytes, found)
    progress(f"{name}: starting")
    with running(name, model, plan.sizes, place) as system:
        asker.warm_up(system, rng)
        for length in plan.lengths:
            progress(f"{name}: {length} tokens, computed and from host memory")
            for ids in prompts[length]:
                asker.ask(system, ids, COLD)
                system.settle()
                system.forget()
                asker.ask(system, ids, MEMORY)
            asker.fill(system, rng, 3 * plan.memory // 2)
            progress(f"{name}: {length} tokens, from the disk")
            for ids in prompts[length]:
                system.forget()
                asker.ask(system, ids, DISK)
        system.settle()
    if plan.restart:
        progress(f"{name}: starting again")
        with running(name, model, plan.sizes, place) as system:
            asker.warm_up(system, rng)
            for length in plan.lengths:
                progress(f"{name}: {length} tokens, from the disk after a restart")
                for ids in prompts[length]:
                    system.forget()
                    asker.ask(system, ids, RESTARTED)


class _Asker:
    """Asks one system and looks where each answer came from."""

    def __init__(self, name: str, token_bytes: int, found: Measured) -> None:
        self._name = name
        self._token_bytes = token_bytes
        self._found = found

    def ask(self, system: System, ids: list[int], kind: str) -> None:
        loaded, read = system.loaded_tokens(), system.disk_bytes()[0]
        seconds = time_to_first_token(system.url, ids)
        share = (system.loaded_tokens() - loaded) / len(ids)
        from_disk = (system.disk_bytes()[0] - read) / (len(ids) * self._token_bytes)
        times = self._found.setdefault((self._name, len(ids), kind), Times())
        if came_from(share, from_disk) == (DISK if kind == RESTARTED else kind):
            times.seconds.append(seconds)
        else:
            times.strays += 1

    def warm_up(self, system: System, rng: random.Random) -> None:
        """The first answers of a server are slow in all systems; the gate learns what loads and steps take."""
        for length in (500, 3000):
            ids = prompt(rng, length)
            for _ in range(3):
                time_to_first_token(system.url, ids)
                system.settle()
                system.forget()

    def fill(self, system: System, rng: random.Random, size: int) -> None:
        """Push what was asked for so far out of host memory, with `size` bytes of blocks of new prompts.

        Each of them twice: a policy other than LRU keeps what was asked for twice for as long as nothing else was.
        """
        tokens = 7000
        for _ in range(-(-size // (tokens * self._token_bytes))):
            ids = prompt(rng, tokens)
            for _ in range(2):
                system.forget()
                time_to_first_token(system.url, ids)
                system.settle()


def came_from(loaded_share: float, disk_share: float) -> str | None:
    """The kind of an answer, from the parts of its prompt that were not computed and that were read from disks."""
    if loaded_share < 0.1:
        return COLD
    if loaded_share < HIT_SHARE:
        return None
    return DISK if disk_share >= HIT_SHARE * 0.9 else MEMORY if disk_share < 0.1 else None


def rows(found: Measured) -> list[dict[str, Any]]:
    made = []
    for (name, length, kind), times in sorted(found.items(), key=lambda item: (item[0][1], _KINDS.index(item[0][2]))):
        cold = found[name, length, COLD].median
        made.append(
            {
                "tokens": length,
                "from": kind,
                "system": name,
                "p50 ms": _ms(times.median),
                "min ms": _ms(min(times.seconds, default=None)),
                "max ms": _ms(max(times.seconds, default=None)),
                "answers": len(times.seconds),
                "strays": times.strays,
                "of cold": round(times.median / cold, 3) if times.median and cold else None,
            }
        )
    return made


_KINDS = (COLD, MEMORY, DISK, RESTARTED)


def targets(found: Measured, names: Iterable[str], lengths: Iterable[int]) -> list[Target]:
    """Ours against the faster peer, and against computing."""
    peers = [name for name in names if name != OURS]
    made = []
    for length in lengths:
        cold = found[OURS, length, COLD].median
        for kind in _KINDS[1:]:
            if (OURS, length, kind) not in found:
                continue
            mine = found[OURS, length, kind].median
            theirs = [found[name, length, kind].median for name in peers if (name, length, kind) in found]
            best = min((median for median in theirs if median is not None), default=None)
            title = f"{kind}, {length} tokens"
            if best is not None:
                ratio = round(mine / best, 3) if mine is not None else None
                made.append(Target.at_most(f"{title}: TTFT over the faster peer's ({NOISE} is noise)", ratio, NOISE))
            saved = round(mine / cold, 3) if mine is not None and cold else None
            made.append(Target.at_most(f"{title}: TTFT over computing", saved, WORTH))
    return made


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 1)

"""The SSD tier: blocks written and read per second, against the bare disk and against vLLM's own file tier.

All three move the same blocks of one memory, which is laid out as the CPU tier's, to and from the same disk, in turns,
after a part of them was written and read to warm up; the median of several turns counts. Jobs come in random order
when read, the blocks of one job in the order in which they were stored.

* `raw`: O_DIRECT with many requests in flight and nothing else. Like the store it writes to new files, reserved before
  (ext4 takes half of what it takes when the same file is written over), and `fdatasync` counts.
* `store`: the SSD tier's. From the first `put` until the last block is on the device (`flush`); from the first `get`
  until the last block is delivered, its checksum compared.
* `vLLM fs`: `FileSystemTierManager`, from the first job until the last is reported, and when writing until the device
  has it too (one `syncfs`): what waits in a device's cache was not written yet, here as there. It checks nothing.

Python's garbage collector looks at nothing that is there before the clock starts, as in vLLM's engine.

A second table is the layer below the store alone, with nothing to merge: every second block of a file, in one batch.
"""

from __future__ import annotations

import gc
import os
import random
import shutil
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.common import Target, progress
from benchmarks.offload_io_tiers import MEASURED, TIERS, WARM, Jobs, Load, Tier
from vllm_pd.kv_offload.block_io.aligned import AlignedMemory, open_file
from vllm_pd.kv_offload.block_io.base import BlockIO, Piece
from vllm_pd.kv_offload.block_io.choose import IOBackend, choose, why_not_nixl
from vllm_pd.kv_offload.block_io.thread_io import ThreadIO

NAME = "SSD read and write"

KIB, MIB = 1 << 10, 1 << 20
SHARE_OF_RAW = 0.9
OVER_FS, OVER_FS_64 = 1.0, 2.0

WARM_BYTES = 64 * MIB
"""As much as the store's staging memory and its readers' buffers, whose pages are all new at first."""


def run(quick: bool) -> tuple[list[dict[str, Any]], list[Target]]:
    """Rows of both tables, and the targets."""
    sizes = (64 * KIB, MIB) if quick else (16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB)
    total, turns = (256 * MIB, 3) if quick else (512 * MIB, 7)
    memory = AlignedMemory(total)
    memory.view[:] = np.random.default_rng(1).bytes(total)
    rows: list[dict[str, Any]] = []
    layers: list[dict[str, Any]] = []
    with _disk() as folder:
        for size in sizes:
            load = Load(memory, size, total // size)
            speeds: dict[tuple[str, str], list[float]] = {}
            costs: dict[tuple[str, str], list[float]] = {}
            for turn in range(turns):
                names = list(TIERS)
                # Whoever comes after another one finds the disk as that one left it.
                random.Random(turn).shuffle(names)
                for name in names:
                    for op, speed, cpu in _turn(TIERS[name], folder, load, turn):
                        speeds.setdefault((name, op), []).append(speed)
                        costs.setdefault((name, op), []).append(cpu)
            speed_of = {key: statistics.median(each) for key, each in speeds.items()}
            for op in ("write", "read"):
                raw, store, fs = (speed_of[name, op] for name in TIERS)
                rows.append(
                    {
                        "block KiB": size // KIB,
                        "op": op,
                        **{f"{name} GB/s": round(speed_of[name, op], 2) for name in TIERS},
                        **{f"{name} CPU s/GB": round(statistics.median(costs[name, op]), 3) for name in TIERS},
                        "store / raw": round(store / raw, 2),
                        "store / fs": round(store / fs, 2),
                    }
                )
                progress(f"  {rows[-1]}")
            layers += _layer(folder, load, turns, {op: speed_of["raw", op] for op in ("write", "read")})
    return rows + layers, _targets(rows)


def _turn(
    make: Callable[[Path, Load], Tier], folder: Path, load: Load, turn: int
) -> list[tuple[Literal["write", "read"], float, float]]:
    """Write everything and read it back twice in other orders; checks what came back.

    Returns:
        Of each operation: its name, GB/s, and seconds of processor time for each GB.
    """
    jobs = load.jobs()
    warm = jobs[: max(1, WARM_BYTES // load.block_bytes // len(jobs[0]))]
    before = zlib.crc32(load.memory.view[: load.size])
    place = folder / "turn"
    place.mkdir()
    tier = make(place, load)
    found: list[tuple[Literal["write", "read"], float, float]] = []

    def measure(op: Literal["write", "read"], move: Callable[[Jobs, int], float]) -> None:
        cpu = time.process_time()
        seconds = move(jobs, MEASURED)
        gigabytes = load.size / 1e9
        found.append((op, gigabytes / seconds, (time.process_time() - cpu) / gigabytes))

    try:
        tier.write(warm, WARM)
        tier.read(warm, WARM)
        gc.collect()
        gc.freeze()
        measure("write", tier.write)
        for again in range(2):
            load.memory.view[: load.size] = bytes(load.size)
            random.Random(2 * turn + again).shuffle(jobs)
            measure("read", tier.read)
    finally:
        gc.unfreeze()
        tier.close()
        shutil.rmtree(place)
        # What deleting leaves to do is not the next one's.
        os.sync()
    if zlib.crc32(load.memory.view[: load.size]) != before:
        raise RuntimeError(f"{make} gave other bytes than it was given")
    return found


def _layer(folder: Path, load: Load, turns: int, raw: dict[str, float]) -> list[dict[str, Any]]:
    """The same through the layer that moves bytes, by each backend."""
    backends: list[BlockIO] = [ThreadIO()]
    if why_not_nixl(folder) is None:
        backends.insert(0, choose(IOBackend.NIXL, folder))
    speeds: dict[tuple[str, str], list[float]] = {}
    for _ in range(turns):
        for io in backends:
            file = io.open(folder / "layer", create_bytes=load.size)
            size, address = load.block_bytes, load.memory.address
            pieces = [Piece(file, number * size, address + number * size, size) for number in range(0, load.count, 2)]

            def written(io: BlockIO = io, pieces: Sequence[Piece] = pieces) -> None:
                _check(io.write(pieces))
                io.sync(pieces[0].file)

            def read(io: BlockIO = io, pieces: Sequence[Piece] = pieces) -> None:
                _check(io.read(pieces))

            for op, work in (("write", written), ("read", read)):
                speeds.setdefault((io.name, op), []).append(_speed(work, len(pieces) * size))
            file.close()
            (folder / "layer").unlink()
            os.sync()
    for io in backends:
        io.close()
    speed_of = {key: statistics.median(each) for key, each in speeds.items()}
    return [
        {
            "block KiB": load.block_bytes // KIB,
            "op": op,
            "backend": name,
            "GB/s": round(speed, 2),
            "share of raw": round(speed / raw[op], 2),
        }
        for (name, op), speed in sorted(speed_of.items(), key=lambda item: item[0][1], reverse=True)
    ]


def _targets(rows: Sequence[dict[str, Any]]) -> list[Target]:
    found = []
    for row in rows:
        what = f"{row['op']} of {row['block KiB']} KiB blocks"
        found.append(Target.at_least(f"{what}, share of raw O_DIRECT", row["store / raw"], SHARE_OF_RAW))
        least = OVER_FS_64 if row["block KiB"] == 64 else OVER_FS
        found.append(Target.at_least(f"{what}, over vLLM's file tier", row["store / fs"], least))
    return found


def _speed(work: Callable[[], None], size: int) -> float:
    """GB/s."""
    began = time.perf_counter()
    work()
    return size / (time.perf_counter() - began) / 1e9


def _check(results: Sequence[OSError | None]) -> None:
    for result in results:
        if result is not None:
            raise result


@contextmanager
def _disk() -> Iterator[Path]:
    """A folder on a disk with O_DIRECT: where temporary files go, or else the current folder.

    Raises:
        RuntimeError: neither has it.
    """
    for place in (tempfile.gettempdir(), "."):
        with tempfile.TemporaryDirectory(prefix="vllm-pd-benchmark-", dir=place) as name:
            file = open_file(Path(name) / "probe", create_bytes=MIB)
            file.close()
            (Path(name) / "probe").unlink()
            if file.direct:
                yield Path(name)
                return
    raise RuntimeError("neither the folder for temporary files nor the current one is on a disk with O_DIRECT")

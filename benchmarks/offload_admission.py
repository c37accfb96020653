"""What the SSD tier's admission filter costs in hits and saves in writes, on public traces.

One engine serves a trace: GPU cache and host memory are small LRU caches, the SSD an LRU cache of several sizes. Sizes
are shares of the trace's different blocks, times those of the trace, one hour. `writes` is the share of all prompt
blocks that were written to the SSD, `hits` of those found on any tier, a block counting only if all before it were.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

from benchmarks.common import Target
from vllm_pd.kv_offload.admission import DAY_S, Admission
from vllm_pd.sim.trace import TraceRequest, read_trace

NAME = "admission to the SSD"

FOLDER = Path("../shared/traces")
TRACES = ("conversation", "synthetic")
GPU_SHARE, CPU_SHARE = 0.01, 0.02
SSD_SHARES = (0.05, 0.1, 0.2, 0.4)
QUICK_REQUESTS = 6000
HOUR_S = 3600.0

RULES = {
    "all": float("inf"),
    "seen before": 0.0,
    "filled once": 1e-9,
    "1 a day": 1.0,
    "1 an hour": DAY_S / HOUR_S,
}
"""Writes per day before blocks seen for the first time are left out; "1 a day" is the default."""


def run(quick: bool) -> tuple[list[dict[str, Any]], list[Target]]:
    """Every rule on every trace and size; no targets where the traces are missing."""
    rows: list[dict[str, Any]] = []
    targets: list[Target] = []
    for name in TRACES:
        path = FOLDER / f"{name}_trace.jsonl"
        if not path.is_file():
            rows.append({"trace": name, "skipped": f"{path} not found"})
            continue
        requests = read_trace(path, limit=QUICK_REQUESTS if quick else None)
        different = len({key for request in requests for key in request.keys})
        for share in SSD_SHARES[-1:] if quick else SSD_SHARES:
            found = {rule: serve(requests, different, share, per_day) for rule, per_day in RULES.items()}
            rows += [{"trace": name, "ssd": share, "rule": rule, **each} for rule, each in found.items()]
            default, blunt, everything = found["1 a day"], found["seen before"], found["all"]
            what = f"{name}, SSD {share:g}"
            targets += [
                Target.at_least(
                    f"{what}: hits over writing only what was seen before", _over(default, blunt, "hits"), 1.0
                ),
                Target.at_most(f"{what}: writes over writing all", _over(default, everything, "writes"), 0.8),
            ]
    return rows, targets


def _over(one: dict[str, float], other: dict[str, float], what: str) -> float | None:
    return round(one[what] / other[what], 3) if other[what] else None


def serve(requests: list[TraceRequest], different: int, ssd_share: float, per_day: float) -> dict[str, float]:
    """The whole trace with one rule."""
    gpu, cpu = _Lru(int(different * GPU_SHARE)), _Lru(int(different * CPU_SHARE))
    ssd = _Lru(int(different * ssd_share))
    admission = Admission(1, ssd.size, per_day, now=0.0)
    hits = blocks = writes = 0
    for request in requests:
        keys = [bytes(key) for key in dict.fromkeys(request.keys)]
        blocks += len(keys)
        hits += next((n for n, key in enumerate(keys) if not (key in gpu or key in cpu or key in ssd)), len(keys))
        # What came to host memory just now is offered; what an earlier request had is fetched from there.
        offered = [key for key in keys if key not in cpu and key not in ssd]
        chosen = {key for key, wants in zip(offered, admission.choose(offered, True, request.at), strict=True) if wants}
        again = {key for key, twice in zip(keys, admission.seen(keys), strict=True) if twice}
        late = [key for key in keys if key in again and key not in chosen and key not in ssd]
        admission.written(len(late), request.at)
        writes += len(chosen) + len(late)
        # The beginning of a prompt is the last to go.
        for key in reversed(keys):
            gpu.use(key)
            cpu.use(key)
            if key in ssd or key in chosen or key in again:
                ssd.use(key)
    return {"hits": hits / blocks, "writes": writes / blocks}


class _Lru:
    def __init__(self, size: int) -> None:
        self.size = size
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def use(self, key: bytes) -> None:
        """Put it in, or to the front."""
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > self.size:
            self._keys.popitem(last=False)

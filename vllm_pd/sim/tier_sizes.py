"""Hit rates over a range of tier sizes: which cells there are, and what each shows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vllm_pd.errors import SettingsError
from vllm_pd.kv_offload.policies import POLICIES
from vllm_pd.sim.parallel import run_cells
from vllm_pd.sim.tier_hits import GpuPass, Hits, behind_gpu, distinct_blocks, replay, replay_optimal
from vllm_pd.sim.trace import TraceRequest

GIB = 1 << 30
OPTIMUM = "optimum"
"""Not a policy: the most that any could reach."""
ENOUGH = 0.9
"""Of the hits that unlimited memory would bring: what a size must reach to be named as enough."""
_DEFAULT_SIZES = 7


@dataclass(frozen=True, slots=True)
class Cell:
    """Tiers of one size, in blocks, and who evicts from the CPU tier."""

    gpu: int
    cpu: int
    ssd: int
    eviction: str


@dataclass(frozen=True, slots=True)
class SizeReport:
    """What the tiers of a cell would have held: parts of all prompt blocks."""

    cell: Cell
    gpu: float
    cpu: float
    ssd: float
    total: float
    refused: int

    def as_dict(self, bytes_per_block: int | None) -> dict[str, Any]:
        """For JSON: sizes in blocks, and in GiB where the size of a block is known."""
        sizes = asdict(self.cell)
        eviction = sizes.pop("eviction")
        out: dict[str, Any] = {"eviction": eviction, **{f"{tier}_blocks": size for tier, size in sizes.items()}}
        if bytes_per_block:
            out |= {f"{tier}_gib": round(size * bytes_per_block / GIB, 3) for tier, size in sizes.items()}
        rates = {"gpu": self.gpu, "cpu": self.cpu, "ssd": self.ssd, "total": self.total}
        return {**out, **{f"hit_{name}": round(rate, 5) for name, rate in rates.items()}, "refused": self.refused}


def default_cpu_sizes(trace: Sequence[TraceRequest]) -> list[int]:
    """No tier, then doubling sizes up to one that holds every block of the trace."""
    most = distinct_blocks(trace)
    return [0, *(most >> i for i in reversed(range(_DEFAULT_SIZES)) if most >> i)]


def cells_of(gpu: Sequence[int], cpu: Sequence[int], ssd: Sequence[int], evictions: Sequence[str]) -> list[Cell]:
    """Every combination that vLLM has, once: without a CPU tier there is neither an SSD nor anything to evict.

    Raises:
        SettingsError: there is none.
    """
    cells: dict[tuple[int, int, int, str], Cell] = {}
    for gpu_size, cpu_size, ssd_size, eviction in itertools.product(gpu, cpu, ssd, evictions):
        # Who knows the future needs no tier below to be the optimum of this one.
        if ssd_size and (not cpu_size or eviction == OPTIMUM):
            continue
        cell = Cell(gpu_size, cpu_size, ssd_size, eviction)
        cells.setdefault((gpu_size, cpu_size, ssd_size, eviction if cpu_size else ""), cell)
    if not cells:
        raise SettingsError("An SSD tier needs a CPU tier above it, and the optimum is that of a CPU tier alone.")
    return list(cells.values())


def measure(
    trace: Sequence[TraceRequest],
    cells: Sequence[Cell],
    block_size: int,
    jobs: int = 1,
    told: Callable[[int, SizeReport], None] | None = None,
) -> list[SizeReport]:
    """One report per cell, in their order; `told` hears of each that is done, with how many that makes."""
    passes = {size: behind_gpu(trace, size, block_size) for size in dict.fromkeys(cell.gpu for cell in cells)}
    return run_cells(_measure_one, passes, cells, jobs, told)


def unlimited(trace: Sequence[TraceRequest], block_size: int) -> float:
    """Part of the prompt blocks that tiers without end would have held."""
    most = max((request.prompt for request in trace), default=0)
    run = behind_gpu(trace, distinct_blocks(trace) + -(-most // block_size), block_size)
    return Hits(run.blocks, run.gpu, 0, 0).rate


def enough(reports: Sequence[SizeReport], ceiling: float) -> list[SizeReport]:
    """For each GPU size, SSD size and policy the smallest CPU tier that has `ENOUGH` of the hits of `ceiling`."""
    found: dict[tuple[int, int, str], SizeReport] = {}
    for report in sorted(reports, key=lambda report: report.cell.cpu):
        if report.total >= ENOUGH * ceiling and report.cell.eviction != OPTIMUM:
            found.setdefault((report.cell.gpu, report.cell.ssd, report.cell.eviction), report)
    return list(found.values())


def _measure_one(passes: dict[int, GpuPass], cell: Cell) -> SizeReport:
    run = passes[cell.gpu]
    if not cell.cpu:
        hits = Hits(run.blocks, run.gpu, 0, 0, run.refused)
    elif cell.eviction == OPTIMUM:
        hits = replay_optimal(run, cell.cpu)
    else:
        hits = replay(run, POLICIES[cell.eviction](cell.cpu), cell.ssd)
    return SizeReport(cell, hits.part(hits.gpu), hits.part(hits.cpu), hits.part(hits.ssd), hits.rate, hits.refused)

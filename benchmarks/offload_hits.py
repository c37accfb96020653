"""Hit rates of each eviction policy of the CPU tier on public traces, over a range of sizes.

The traces are Mooncake's (FAST'25), `conversation_trace.jsonl` and `synthetic_trace.jsonl`; the folder is the one of
`benchmarks.simulation`, or what VLLM_PD_TRACES names. A hit is a block of a prompt all of whose blocks before it hit,
in the GPU's cache or in the tier; `optimum` is Belady's, over what the GPU leaves to be found (`sim.tier_hits`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import Target, progress
from benchmarks.simulation import DEFAULT_FOLDER, TRACES
from vllm_pd.kv_offload.policies import POLICIES
from vllm_pd.sim.tier_sizes import OPTIMUM, SizeReport, cells_of, measure
from vllm_pd.sim.trace import SOURCE, read_trace
from vllm_pd.tier_choices import DEFAULT_EVICTION

NAME = "hit rates of eviction policies"

FOLDER_VARIABLE = "VLLM_PD_TRACES"
BLOCK = 512
GPU_BLOCKS = (1024, 4096)
"""Half a million tokens and two million."""
CPU_BLOCKS = (1024, 2048, 4096, 8192, 16384, 32768)
RIVALS = ("lru", "arc")
"""What vLLM has."""
QUICK_REQUESTS = 2500


def run(quick: bool) -> tuple[list[dict[str, Any]], list[Target]]:
    """Results and targets. Without the traces there are no results, and a target that is not met says so."""
    folder = Path(os.environ.get(FOLDER_VARIABLE) or DEFAULT_FOLDER)
    results: list[dict[str, Any]] = []
    targets: list[Target] = []
    for name in TRACES:
        path = folder / f"{name}_trace.jsonl"
        if not path.is_file():
            progress(
                f"  {path} not found; get Mooncake's traces from {SOURCE} and name their folder in {FOLDER_VARIABLE}"
            )
            targets.append(Target.at_least(f"{name}: trace found", None, 1))
            continue
        trace = read_trace(path, limit=QUICK_REQUESTS if quick else None, block_size=BLOCK)
        gpu, cpu = (GPU_BLOCKS[:1], CPU_BLOCKS[1::2]) if quick else (GPU_BLOCKS, CPU_BLOCKS)
        cells = cells_of(gpu, cpu, (0,), [*POLICIES, OPTIMUM])
        by_size: dict[tuple[int, int], dict[str, SizeReport]] = {}
        progress(f"  {name}: {len(cells)} cells")
        for report in measure(trace, cells, BLOCK, len(os.sched_getaffinity(0))):
            by_size.setdefault((report.cell.gpu, report.cell.cpu), {})[report.cell.eviction] = report
        for (gpu_size, cpu_size), reports in by_size.items():
            results.append(_row(name, gpu_size, cpu_size, reports))
            best = max(reports[rival].total for rival in RIVALS)
            targets.append(
                Target.at_least(
                    f"{name}, GPU {gpu_size}, CPU {cpu_size} blocks: {DEFAULT_EVICTION}, best of {', '.join(RIVALS)}",
                    round(reports[DEFAULT_EVICTION].total, 4),
                    round(best, 4),
                )
            )
    return results, targets


def _row(trace: str, gpu: int, cpu: int, reports: Mapping[str, SizeReport]) -> dict[str, Any]:
    rates = {name: round(report.total, 4) for name, report in reports.items()}
    return {
        "trace": trace,
        "gpu_blocks": gpu,
        "cpu_blocks": cpu,
        "gpu_alone": round(reports[DEFAULT_EVICTION].gpu, 4),
        **rates,
    }

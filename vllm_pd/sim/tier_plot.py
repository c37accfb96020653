"""Plot of tier sizes: hit rate over the size of the CPU tier, one line for each GPU cache, SSD and policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_pd.sim.tier_sizes import GIB, SizeReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(reports: Sequence[SizeReport], ceiling: float, block_bytes: int | None, title: str) -> Figure:
    """The figure of at least one report. `page.require_plots` says whether that is possible.

    Args:
        ceiling: what tiers without end would have held.
        block_bytes: if known, sizes are shown in GiB, else in blocks.
    """
    from matplotlib.figure import Figure

    scale, unit = (block_bytes / GIB, "GiB") if block_bytes else (1.0, "blocks")
    lines: dict[tuple[int, int, str], list[SizeReport]] = {}
    for report in reports:
        if report.cell.cpu:
            lines.setdefault((report.cell.gpu, report.cell.ssd, report.cell.eviction), []).append(report)
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axis = figure.subplots()
    for (gpu, ssd, eviction), line in lines.items():
        line.sort(key=lambda report: report.cell.cpu)
        label = f"{eviction}, GPU {gpu * scale:g} {unit}" + (f", SSD {ssd * scale:g} {unit}" if ssd else "")
        axis.plot(
            [report.cell.cpu * scale for report in line],
            [report.total * 100 for report in line],
            marker="o",
            markersize=3,
            label=label,
        )
    for gpu, alone in {report.cell.gpu: report.gpu for report in reports}.items():
        axis.axhline(alone * 100, color="gray", linewidth=0.8, linestyle=":", label=f"GPU {gpu * scale:g} {unit} alone")
    axis.axhline(ceiling * 100, color="black", linewidth=0.8, linestyle="--", label="unlimited")
    if lines:
        axis.set_xscale("log", base=2)
    axis.set_ylim(bottom=0)
    axis.set_xlabel(f"CPU tier, {unit}")
    axis.set_ylabel("prompt tokens from a cache, %")
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
    figure.suptitle(title)
    return figure

"""Plots of simulations: one column for each cluster and speed, one row for each question, one color for each policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_pd.sim import page
from vllm_pd.sim.report import Report, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TIERS = (("GPU", 1.0), ("CPU", 0.6), ("SSD", 0.3))
"""Tiers and how strongly their part of a bar is colored."""


def draw(reports: Sequence[Report], title: str) -> Figure:
    """The figure of at least one report. `page.require_plots` says whether that is possible."""
    from matplotlib.figure import Figure

    cells = list(dict.fromkeys((report.cluster, report.speed) for report in reports))
    policies = list(dict.fromkeys(report.label for report in reports))
    colors = {policy: f"C{i % 10}" for i, policy in enumerate(policies)}
    figure = Figure(figsize=(1.5 + 3.8 * len(cells), 12), layout="constrained")
    axes = figure.subplots(4, len(cells), squeeze=False, sharey="row")
    for column, cell in enumerate(cells):
        here = [report for report in reports if (report.cluster, report.speed) == cell]
        axes[0][column].set_title(f"{cell[0]} workers, arrivals x{cell[1]:g}")
        _draw_ttft(axes[0][column], here, colors)
        _draw_itl(axes[1][column], here, colors)
        _draw_hits(axes[2][column], here, colors)
        _draw_shares(axes[3][column], here, colors)
    for row, label in enumerate(
        ("requests, %", "ITL, ms (bar: mean, line: p99)", "prompt tokens from cache, %", "load, max / mean")
    ):
        axes[row][0].set_ylabel(label)
    axes[0][0].legend(fontsize="small")
    figure.suptitle(title)
    return figure


def save_html(figure: Figure, reports: Sequence[Report], title: str, path: Path) -> None:
    """Write one file with the figure and the table that needs nothing else. Raises SettingsError."""
    best: dict[tuple[str, float], int] = {}
    for number, report in enumerate(reports):
        cell = (report.cluster, report.speed)
        if cell not in best or report.ttft_mean < reports[best[cell]].ttft_mean:
            best[cell] = number
    head, *rows = table(reports)
    note = "Times in milliseconds; bold: the lowest mean TTFT of its cluster and speed."
    page.save_html(path, title, figure, head, rows, best=set(best.values()), notes=(note,))


def _draw_ttft(axis: Any, reports: Sequence[Report], colors: dict[str, str]) -> None:
    for report in reports:
        axis.plot(report.ttft_curve, range(101), color=colors[report.label], label=report.label)
    axis.set_xscale("log")
    axis.set_xlabel("TTFT below, ms")
    axis.grid(alpha=0.3)


def _bars(axis: Any, reports: Sequence[Report]) -> range:
    places = range(len(reports))
    axis.set_xticks(places, [report.label for report in reports], rotation=40, ha="right", fontsize="small")
    axis.grid(axis="y", alpha=0.3)
    return places


def _draw_itl(axis: Any, reports: Sequence[Report], colors: dict[str, str]) -> None:
    for place, report in zip(_bars(axis, reports), reports, strict=True):
        axis.bar(place, report.itl_mean, color=colors[report.label])
        axis.plot((place, place), (report.itl_mean, report.itl_p99), color="black", linewidth=1)


def _draw_hits(axis: Any, reports: Sequence[Report], colors: dict[str, str]) -> None:
    for place, report in zip(_bars(axis, reports), reports, strict=True):
        bottom = 0.0
        for (_, strength), part in zip(_TIERS, (report.hit_gpu, report.hit_cpu, report.hit_ssd), strict=True):
            axis.bar(place, part * 100, bottom=bottom, color=colors[report.label], alpha=strength)
            bottom += part * 100
    if any(report.hit_cpu or report.hit_ssd for report in reports):
        axis.set_xlabel("strong to faint: GPU, CPU, SSD", fontsize="small")


def _draw_shares(axis: Any, reports: Sequence[Report], colors: dict[str, str]) -> None:
    for place, report in zip(_bars(axis, reports), reports, strict=True):
        axis.bar(place - 0.2, report.share_max, width=0.38, color=colors[report.label])
        axis.bar(place + 0.2, report.busy_max, width=0.38, color=colors[report.label], alpha=0.5)
    axis.set_xlabel("strong: requests, faint: seconds computed", fontsize="small")
    axis.axhline(1, color="black", linewidth=0.8)

"""Plots as files: a picture, or a page with the picture and its table that needs nothing else."""

from __future__ import annotations

import html
import importlib.util
import io
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_pd.errors import SettingsError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 14px/1.4 system-ui, sans-serif; margin: 2em; color: #222; }}
svg {{ max-width: 100%; height: auto; }}
table {{ border-collapse: collapse; margin-top: 2em; }}
th, td {{ padding: 0.25em 0.7em; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }}
th:first-child, td:first-child {{ text-align: left; }}
tr.best td {{ font-weight: 600; }}
</style></head><body>
<h1>{title}</h1>
{figure}
<table><thead><tr>{head}</tr></thead><tbody>
{rows}
</tbody></table>
{notes}
</body></html>
"""


def require_plots() -> None:
    """Raises SettingsError when plots cannot be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise SettingsError("Plots need matplotlib; install vllm-pd[plot].")


def save_png(figure: Figure, path: Path) -> None:
    """Write the figure.

    Raises:
        SettingsError: the file cannot be written.
    """
    try:
        figure.savefig(path, format="png", dpi=110)
    except OSError as e:
        raise SettingsError(f"The plot {path} cannot be written: {e.strerror}.") from None


def save_html(
    path: Path,
    title: str,
    figure: Figure,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    best: Collection[int] = (),
    notes: Sequence[str] = (),
) -> None:
    """Write the page; the rows whose number is in `best` are bold.

    Raises:
        SettingsError: the file cannot be written.
    """
    drawing = io.StringIO()
    figure.savefig(drawing, format="svg", metadata={"Date": None})
    svg = drawing.getvalue()
    body = "\n".join(
        ('<tr class="best">' if number in best else "<tr>") + _cells("td", row) + "</tr>"
        for number, row in enumerate(rows)
    )
    text = _PAGE.format(
        title=html.escape(title),
        figure=svg[svg.index("<svg") :],
        head=_cells("th", head),
        rows=body,
        notes="\n".join(f"<p>{html.escape(note)}</p>" for note in notes),
    )
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as e:
        raise SettingsError(f"The page {path} cannot be written: {e.strerror}.") from None


def _cells(tag: str, row: Sequence[str]) -> str:
    return "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row)

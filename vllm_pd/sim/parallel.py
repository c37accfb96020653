"""Many simulations of one trace, in several processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, TypeVar

Shared = TypeVar("Shared")
Cell = TypeVar("Cell")
Result = TypeVar("Result")


def run_cells(
    function: Callable[[Shared, Cell], Result],
    shared: Shared,
    cells: Sequence[Cell],
    jobs: int = 1,
    told: Callable[[int, Result], None] | None = None,
) -> list[Result]:
    """`function(shared, cell)` for each cell, in `jobs` processes; results in the order of the cells.

    `told` hears of each that is done, with how many that makes.
    """
    results: list[Result] = []
    jobs = min(jobs, len(cells))
    if jobs <= 1:
        for cell in cells:
            results.append(function(shared, cell))
            if told is not None:
                told(len(results), results[-1])
        return results
    # Forked, so that what is shared is there without being copied.
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(jobs, context, _keep, (function, shared)) as pool:
        futures = [pool.submit(_run_kept, cell) for cell in cells]
        for count, future in enumerate(as_completed(futures), 1):
            if told is not None:
                told(count, future.result())
            else:
                future.result()
        return [future.result() for future in futures]


_kept: tuple[Callable[[Any, Any], Any], Any] | None = None


def _keep(function: Callable[[Any, Any], Any], shared: Any) -> None:
    global _kept
    _kept = function, shared


def _run_kept(cell: Any) -> Any:
    assert _kept is not None
    function, shared = _kept
    return function(shared, cell)

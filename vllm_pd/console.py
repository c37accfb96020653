"""What the commands of `vllm-pd` share: how they are told of a store and of pools in it, and tables."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_pd import layered, serve_flags
from vllm_pd.errors import SettingsError
from vllm_pd.settings import WorkerSettings
from vllm_pd.state.base import PoolId, WorkerState

_POOL_ID = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class Pool:
    """A pool and its live workers."""

    id: PoolId
    workers: tuple[WorkerState, ...]

    @property
    def model(self) -> str:
        """The model of its workers; empty when none lives."""
        return self.workers[0].record.pool.model if self.workers else ""


def add_store_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--store` and `--namespace`, which may come from the environment too."""
    for name in ("store", "namespace"):
        spec = layered.settings_of(WorkerSettings)[name]
        parser.add_argument(
            f"--{name}", dest=serve_flags.dest(name), metavar=name.upper(), help=f"{spec.help} (or {spec.env})"
        )


def store_settings(args: argparse.Namespace) -> WorkerSettings:
    """The settings that name the store.

    Raises:
        SettingsError: there is none, or one is malformed.
    """
    settings = serve_flags.read_request(args, os.environ).settings()
    if not settings.store:
        raise SettingsError("No store is given; add --store redis://HOST:PORT or set VLLM_PD_STORE.")
    return settings


def add_pool_flag(parser: argparse.ArgumentParser) -> None:
    """Add `--pool`."""
    parser.add_argument(
        "--pool", type=_pool_id, metavar="ID", help="only this pool; default: those of all live workers"
    )


def pools_of(workers: Sequence[WorkerState], only: PoolId | None) -> list[Pool]:
    """The pools of the live workers, or only the one, which may have none."""
    by_pool: dict[PoolId, list[WorkerState]] = {only: []} if only is not None else {}
    for worker in workers:
        by_pool.setdefault(worker.record.pool.id, []).append(worker)
    return [Pool(id, tuple(members)) for id, members in sorted(by_pool.items()) if only in (None, id)]


def nobody(settings: WorkerSettings) -> str:
    """What to tell whoever asks about pools where there is none."""
    return f"No worker is registered in namespace {settings.namespace!r}; a pool without one can be named with --pool."


def _pool_id(text: str) -> PoolId:
    if not _POOL_ID.fullmatch(text):
        raise argparse.ArgumentTypeError("a pool is named by 16 hex digits")
    return PoolId(text)


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, figures: bool = False) -> None:
    """To stdout, in columns. `figures`: all but the first column stand to the right."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    for row in [head, *rows]:
        cells = [
            cell.rjust(width) if figures and i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())

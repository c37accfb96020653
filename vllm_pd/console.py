"""What the commands of `vllm-pd` share: how they are told of a store and of pools in it, and tables."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from vllm_pd import layered, serve_flags
from vllm_pd.errors import SettingsError
from vllm_pd.settings import WorkerSettings
from vllm_pd.state.base import PoolId, WorkerState
from vllm_pd.state.open_registry import open_registry

# A command may wait longer than a router: a person watches it.
_TIMEOUT_S = 5.0
_POOL_ID = re.compile(r"[0-9a-f]{16}")


class _Client(Protocol):
    """Of the store."""

    async def close(self) -> None: ...


_Opened = TypeVar("_Opened", bound=_Client)
_Found = TypeVar("_Found")


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


def for_each_pool(
    args: argparse.Namespace, opened: Callable[..., _Opened], call: Callable[[_Opened, Pool], Awaitable[_Found]]
) -> list[tuple[Pool, _Found]]:
    """The result of a call for each pool that the command is about; where there is none, stderr says so.

    Args:
        args: has the flags of `add_store_flags` and `add_pool_flag`.
        opened: a function of `state.open_registry`; what it makes goes into the call.

    Raises:
        SettingsError: see `store_settings`.
        StoreError: the store did not answer.
    """
    settings = store_settings(args)

    async def run() -> list[tuple[Pool, _Found]]:
        registry = open_registry(settings.store, settings.namespace, timeout_s=_TIMEOUT_S)
        client = opened(settings.store, settings.namespace, timeout_s=_TIMEOUT_S)
        try:
            pools = _pools_of((await registry.snapshot()).workers, args.pool)
            return [(pool, await call(client, pool)) for pool in pools]
        finally:
            await registry.close()
            await client.close()

    found = asyncio.run(run())
    if not found:
        where = f"namespace {settings.namespace!r}"
        print(f"No worker is registered in {where}; a pool without one can be named with --pool.", file=sys.stderr)
    return found


def _pools_of(workers: Sequence[WorkerState], only: PoolId | None) -> list[Pool]:
    """The pools of the live workers, or only the one, which may have none."""
    by_pool: dict[PoolId, list[WorkerState]] = {only: []} if only is not None else {}
    for worker in workers:
        by_pool.setdefault(worker.record.pool.id, []).append(worker)
    return [Pool(id, tuple(members)) for id, members in sorted(by_pool.items()) if only in (None, id)]


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

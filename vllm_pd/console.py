"""What the commands of `vllm-pd` share: how they are grouped and told of numbers, a store and its pools; tables."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

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


def add_group(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str, examples: str
) -> argparse._SubParsersAction[argparse.ArgumentParser]:
    """Add a command that has commands of its own; they are added to what this returns, with `add_action`.

    Args:
        text: what the command does, as `--help` shows it.
        examples: shown below the help, with the exit codes.
    """
    parser = commands.add_parser(name, help=text, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter)
    return parser.add_subparsers(required=True, metavar="ACTION")


def add_action(
    actions: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], int],
    text: str,
    *,
    examples: str = "",
) -> argparse.ArgumentParser:
    """Add one command of a group: `run` is called with the parsed arguments and returns the exit code."""
    action = actions.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=examples or None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    action.set_defaults(run=run)
    return action


def add_output(parser: argparse.ArgumentParser, json_help: str) -> None:
    """Add the arguments of a command that computes rows for a while: how they are shown, and by how many processes."""
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help=json_help)
    output.add_argument("--plot", type=Path, metavar="FILE.png", help="write a plot (needs vllm-pd[plot])")
    output.add_argument(
        "--html", type=Path, metavar="FILE.html", help="write plot and table as one page (needs vllm-pd[plot])"
    )
    output.add_argument(
        "--jobs", type=positive, default=os.cpu_count() or 1, metavar="N", help="processes; default: one a core"
    )
    output.add_argument("--quiet", action="store_true", help="no progress on stderr")


def positive(text: str) -> int:
    """Type of an argument: a whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def natural(text: str) -> int:
    """Type of an argument: a whole number of at least 0."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError("must be at least 0")
    return value


def number_list(kind: type[int] | type[float], *, zero: bool = False) -> Callable[[str], list[Any]]:
    """Type of an argument: numbers above 0 (or `zero`), separated by commas."""

    def parse(text: str) -> list[Any]:
        values = [kind(part) for part in text.split(",")]
        if not all(value > 0 or (zero and value == 0) for value in values):
            raise argparse.ArgumentTypeError(f"every number must be {'at least' if zero else 'above'} 0")
        return values

    # Named in argparse's message about what cannot be parsed.
    parse.__name__ = f"list of {kind.__name__}"
    return parse


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


def with_pool_flags(action: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The same command, with `--store`, `--namespace` and `--pool`: for one that calls `for_each_pool`."""
    add_store_flags(action)
    action.add_argument(
        "--pool", type=_pool_id, metavar="ID", help="only this pool; default: those of all live workers"
    )
    return action


def for_each_pool(
    args: argparse.Namespace,
    opened: Callable[..., _Opened],
    call: Callable[[_Opened, Pool], Awaitable[_Found]],
    *,
    more: Callable[[_Opened], Awaitable[Sequence[PoolId]]] | None = None,
) -> list[tuple[Pool, _Found]]:
    """The result of a call for each pool that the command is about; where there is none, stderr says so.

    Args:
        args: has the flags of `with_pool_flags`.
        opened: a function of `state.open_registry`; what it makes goes into the call.
        more: which pools there are beside those of live workers.

    Raises:
        SettingsError: see `store_settings`.
        StoreError: the store did not answer.
    """
    settings = store_settings(args)

    async def run() -> list[tuple[Pool, _Found]]:
        registry = open_registry(settings.store, settings.namespace, timeout_s=_TIMEOUT_S)
        client = opened(settings.store, settings.namespace, timeout_s=_TIMEOUT_S)
        try:
            named = [args.pool] if args.pool is not None else await more(client) if more is not None else []
            pools = _pools_of((await registry.snapshot()).workers, args.pool, named)
            return [(pool, await call(client, pool)) for pool in pools]
        finally:
            await registry.close()
            await client.close()

    found = asyncio.run(run())
    if not found:
        where = f"namespace {settings.namespace!r}"
        print(f"No worker is registered in {where}; a pool without one can be named with --pool.", file=sys.stderr)
    return found


def _pools_of(workers: Sequence[WorkerState], only: PoolId | None, named: Sequence[PoolId]) -> list[Pool]:
    """The pools of the live workers and those named, which may have none; or only the one."""
    by_pool: dict[PoolId, list[WorkerState]] = {pool: [] for pool in named}
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

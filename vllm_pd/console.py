"""What the commands of `vllm-pd` share: how they are told of a store, and tables."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from vllm_pd import layered, serve_flags
from vllm_pd.errors import SettingsError
from vllm_pd.settings import WorkerSettings


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


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, figures: bool = False) -> None:
    """To stdout, in columns. `figures`: all but the first column stand to the right."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    for row in [head, *rows]:
        cells = [
            cell.rjust(width) if figures and i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())

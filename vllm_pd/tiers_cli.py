"""`vllm-pd tiers`: how large the tiers of the KV cache should be, and what is in the one on the SSD."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_pd import tiers_store_cli
from vllm_pd.console import add_action, add_group, add_output, number_list, positive, print_table
from vllm_pd.errors import SettingsError
from vllm_pd.tier_choices import DEFAULT_EVICTION, EVICTIONS

if TYPE_CHECKING:
    from vllm_pd.sim.tier_sizes import SizeReport

_EXAMPLES = """examples:
  vllm-pd tiers size --trace trace.jsonl      which part of all prompts tiers of several sizes would have held
  vllm-pd tiers stat /nvme/kv                 what the SSD tier in that folder holds; safe while servers use it
  vllm-pd tiers verify /nvme/kv               whether every block there is what was stored
  vllm-pd tiers clear /nvme/kv --all          empty it

exit code: 0 fine, 1 something is damaged or in use, 2 a wrong setting"""

_SIZE_EXAMPLES = """examples:
  # how much memory is worth buying for this traffic? Sizes from none to all that the trace holds
  vllm-pd tiers size --trace trace.jsonl --gpu-blocks 2048

  # in GiB, for a model, with a page to look at
  vllm-pd tiers size --trace trace.jsonl --model /models/llama-8b --gpu-gib 40 --cpu-gib 64,128,256 --html sizes.html

  # does an SSD below 64 GiB of memory pay?
  vllm-pd tiers size --trace trace.jsonl --kv-bytes-per-token 131072 --gpu-gib 40 --cpu-gib 64 --ssd-gib 0,500,1000,2000

  # every eviction policy, and the most that any could reach
  vllm-pd tiers size --trace trace.jsonl --eviction all

A trace has one JSON object a line: timestamp (ms), input_length, output_length, hash_ids (one number for each 512
tokens of the prompt; equal numbers mean equal content). Public ones: """

_SIZE_EXIT_CODES = """
exit code: 0 done, 2 a wrong setting"""

_TIERS = ("gpu", "cpu", "ssd")
_GIB = 1 << 30


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    text = "how large the tiers of the KV cache should be, and what is in the one on the SSD"
    actions = add_group(commands, "tiers", text, _EXAMPLES)
    _add_size(actions)
    tiers_store_cli.add_actions(actions)


def _add_size(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from vllm_pd.sim.kv_bytes import DTYPE_BYTES
    from vllm_pd.sim.trace import SOURCE

    size = add_action(
        actions,
        "size",
        _size,
        "which part of a trace's prompts tiers of several sizes would have held",
        examples=_SIZE_EXAMPLES + SOURCE + _SIZE_EXIT_CODES,
    )
    size.add_argument("--trace", type=Path, required=True, metavar="FILE", help="a trace in Mooncake's format")
    size.add_argument("--limit", type=positive, metavar="N", help="only the first N requests")
    sizes = size.add_argument_group("sizes (lists, separated by commas; every combination is a row)")
    for tier, what, default in (
        ("gpu", "GPU cache of one server", "2048 blocks"),
        ("cpu", "host memory, as --pd-cpu-gib", "none to all that the trace holds"),
        ("ssd", "SSD, as --pd-ssd-gib", "none"),
    ):
        either = sizes.add_mutually_exclusive_group()
        either.add_argument(
            f"--{tier}-gib",
            type=number_list(float, zero=tier != "gpu"),
            metavar="LIST",
            help=f"{what}; default: {default}",
        )
        either.add_argument(
            f"--{tier}-blocks",
            type=number_list(int, zero=tier != "gpu"),
            metavar="LIST",
            help="the same in blocks of --block-size tokens",
        )
    model = size.add_argument_group("bytes of a token's KV, for sizes in GiB")
    either = model.add_mutually_exclusive_group()
    either.add_argument(
        "--kv-bytes-per-token", type=positive, metavar="N", help="over all layers and all GPUs of a server"
    )
    either.add_argument(
        "--model", type=Path, metavar="PATH", help="folder of a model, or its config.json: computed from it"
    )
    model.add_argument(
        "--kv-cache-dtype",
        choices=("auto", *DTYPE_BYTES),
        default="auto",
        metavar="DTYPE",
        help="with --model, as of vllm serve; default: that of the model",
    )
    size.add_argument(
        "--eviction",
        default=DEFAULT_EVICTION,
        metavar="LIST",
        help=f"who evicts from host memory: {', '.join(EVICTIONS)}, optimum (knows the future), or `all`; "
        "default: %(default)s",
    )
    size.add_argument("--block-size", type=positive, default=512, metavar="N", help="tokens; default: %(default)s")
    size.add_argument(
        "--hash-tokens",
        type=positive,
        default=512,
        metavar="N",
        help="tokens that a hash id stands for; default: %(default)s",
    )
    add_output(size, "print one JSON object instead of a table")


def _size(args: argparse.Namespace) -> int:
    from vllm_pd.sim import page, tier_plot, tier_sizes
    from vllm_pd.sim.trace import read_trace

    if args.plot or args.html:
        page.require_plots()
    evictions = _evictions(args.eviction)
    token_bytes = _token_bytes(args)
    block_bytes = token_bytes * args.block_size if token_bytes else None
    trace = read_trace(args.trace, limit=args.limit, block_size=args.block_size, hash_tokens=args.hash_tokens)
    sizes = {tier: _blocks(args, tier, block_bytes) for tier in _TIERS}
    cells = tier_sizes.cells_of(
        sizes["gpu"] or [2048], sizes["cpu"] or tier_sizes.default_cpu_sizes(trace), sizes["ssd"] or [0], evictions
    )

    def told(done: int, report: SizeReport) -> None:
        if not args.quiet:
            cell = report.cell
            where = f"GPU {cell.gpu}, CPU {cell.cpu}, SSD {cell.ssd} blocks, {cell.eviction}"
            print(f"{done}/{len(cells)} {where}: {report.total:.1%}", file=sys.stderr, flush=True)

    reports = tier_sizes.measure(trace, cells, args.block_size, args.jobs, told)
    ceiling = tier_sizes.unlimited(trace, args.block_size)
    if args.json:
        print(
            json.dumps(
                {
                    "trace": args.trace.name,
                    "requests": len(trace),
                    "block_size": args.block_size,
                    "kv_bytes_per_token": token_bytes,
                    "unlimited": round(ceiling, 5),
                    "cells": [report.as_dict(block_bytes) for report in reports],
                }
            )
        )
    head, rows = table(reports, block_bytes)
    notes = _notes(reports, ceiling, block_bytes)
    if not args.json:
        print_table(head, rows, figures=True)
        print("\n" + "\n".join(notes))
    if args.plot or args.html:
        title = f"{args.trace.name}, {len(trace)} requests"
        figure = tier_plot.draw(reports, ceiling, block_bytes, title)
        if args.plot:
            page.save_png(figure, args.plot)
        if args.html:
            page.save_html(args.html, title, figure, head, rows, notes=notes)
    return 0


def table(reports: Sequence[SizeReport], block_bytes: int | None) -> tuple[list[str], list[list[str]]]:
    """Head and rows. Sizes are GiB where the bytes of a block are known, else blocks."""
    unit = "GiB" if block_bytes else "blocks"
    head = ["eviction", *(f"{tier.upper()}, {unit}" for tier in _TIERS), "GPU hits", "CPU hits", "SSD hits", "hits"]
    rows = [
        [
            report.cell.eviction if report.cell.cpu else "-",
            *(size_text(size, block_bytes) for size in (report.cell.gpu, report.cell.cpu, report.cell.ssd)),
            *(f"{rate:.1%}" for rate in (report.gpu, report.cpu, report.ssd, report.total)),
        ]
        for report in reports
    ]
    return head, rows


def size_text(blocks: int, block_bytes: int | None) -> str:
    return f"{blocks * block_bytes / _GIB:.1f}" if block_bytes else str(blocks)


def _notes(reports: Sequence[SizeReport], ceiling: float, block_bytes: int | None) -> list[str]:
    from vllm_pd.sim import tier_sizes

    unit = "GiB" if block_bytes else "blocks"
    notes = [f"Hits are parts of all prompt tokens. Tiers without end would have held {ceiling:.1%}."]
    for report in tier_sizes.enough(reports, ceiling):
        cell = report.cell
        gpu, cpu, ssd = (size_text(size, block_bytes) for size in (cell.gpu, cell.cpu, cell.ssd))
        below = f" and an SSD of {ssd} {unit}" if cell.ssd else ""
        notes.append(
            f"With a GPU cache of {gpu} {unit}{below}, a CPU tier of {cpu} {unit} ({cell.eviction}) has at least "
            f"{tier_sizes.ENOUGH:.0%} of these."
        )
    if refused := max(report.refused for report in reports):
        notes.append(f"Up to {refused} prompts are longer than the GPU cache and are left out.")
    return notes


def _evictions(text: str) -> list[str]:
    from vllm_pd.kv_offload.policies import POLICIES
    from vllm_pd.layered import nearest
    from vllm_pd.sim.tier_sizes import OPTIMUM

    known = [*POLICIES, OPTIMUM]
    names = known if text == "all" else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise SettingsError(
                f"There is no eviction policy {name!r}{nearest(name, known)}; choose from {', '.join(known)}."
            )
    return names


def _token_bytes(args: argparse.Namespace) -> int | None:
    from vllm_pd.sim.kv_bytes import kv_bytes_per_token

    if args.model is not None:
        return kv_bytes_per_token(args.model, args.kv_cache_dtype)
    known: int | None = args.kv_bytes_per_token
    return known


def _blocks(args: argparse.Namespace, tier: str, block_bytes: int | None) -> list[int]:
    """The sizes given for a tier, in blocks; none if it is left to the default."""
    gib: list[float] | None = getattr(args, f"{tier}_gib")
    blocks: list[Any] = getattr(args, f"{tier}_blocks") or []
    if gib is None:
        return blocks
    if block_bytes is None:
        raise SettingsError(
            f"--{tier}-gib needs the size of a token's KV; add --model or --kv-bytes-per-token, or use --{tier}-blocks."
        )
    sizes = [int(size * _GIB / block_bytes) for size in gib]
    if any(size and not count for size, count in zip(gib, sizes, strict=True)):
        raise SettingsError(f"--{tier}-gib names a size below one block of {block_bytes} bytes; make it larger.")
    return sizes

"""`vllm-pd tiers stat|verify|clear DIR`: what an SSD tier holds, whether it is whole, and emptying it."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_pd.console import add_action, print_table
from vllm_pd.errors import SettingsError

if TYPE_CHECKING:
    from vllm_pd.kv_offload.segments.check import FolderStat, NamespaceStat, VerifyResult

_GIB = 1 << 30
_SHOW_EVERY_S = 0.2

_STAT_EXAMPLES = """examples:
  vllm-pd tiers stat /nvme/kv           what is in the folder that servers were given as --pd-ssd-path
  vllm-pd tiers stat /nvme/kv --json    the same as one JSON object, every file that cannot be used with its reason

Safe while servers use the folder. Block contents are not read.

exit code: 0 fine, 1 a file cannot be used, 2 a wrong setting"""

_VERIFY_EXAMPLES = """examples:
  vllm-pd tiers verify /nvme/kv                    read every block and compare its checksum
  vllm-pd tiers verify /nvme/kv --namespace NAME   of one model; `vllm-pd tiers stat` lists the names

Safe while servers use the folder; what they are writing, or evict meanwhile, counts as neither good nor bad. A server
does the same with each block that it loads, so a bad one costs it a miss, never a wrong answer.

exit code: 0 every block is what was stored, 1 some are not, 2 a wrong setting"""

_CLEAR_EXAMPLES = """examples:
  vllm-pd tiers clear /nvme/kv --namespace NAME    remove the blocks of one model; `vllm-pd tiers stat` lists the names
  vllm-pd tiers clear /nvme/kv --all               remove every model's

What a server is using is left alone. Blocks are computed again when they are asked for: nothing but time is lost.

exit code: 0 removed, 1 something is in use and was left, 2 a wrong setting"""


def add_actions(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands."""
    stat = add_action(actions, "stat", _explained(_stat), "what an SSD tier holds, by model", examples=_STAT_EXAMPLES)
    verify = add_action(
        actions,
        "verify",
        _explained(_verify),
        "read every block of an SSD tier and compare checksums",
        examples=_VERIFY_EXAMPLES,
    )
    clear = add_action(actions, "clear", _explained(_clear), "empty an SSD tier", examples=_CLEAR_EXAMPLES)
    for action in (stat, verify, clear):
        action.add_argument("dir", type=Path, metavar="DIR", help="the folder that servers are given as --pd-ssd-path")
        action.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    which = "only this one; may be given several times"
    verify.add_argument("--namespace", action="append", metavar="NAME", help=which)
    verify.add_argument("--quiet", action="store_true", help="no progress on stderr")
    either = clear.add_mutually_exclusive_group(required=True)
    either.add_argument("--namespace", action="append", metavar="NAME", help=which)
    either.add_argument("--all", action="store_true", help="every namespace that no server uses")


def _stat(args: argparse.Namespace) -> int:
    check = _check()
    found: FolderStat = check.stat(_root(args.dir))
    if args.json:
        print(json.dumps({**asdict(found), "root": str(found.root)}))
    else:
        head = ("namespace", "blocks", "GiB", "segments", "block MiB", "written", "in use by", "dtype", "layout")
        print_table(head, [_stat_row(namespace) for namespace in found.namespaces], figures=False)
        taken = sum(namespace.bytes for namespace in found.namespaces)
        print(
            f"\n{found.root}: {taken / _GIB:.2f} GiB, and {found.free_bytes / _GIB:.1f} of "
            f"{found.total_bytes / _GIB:.1f} GiB of the file system are free."
        )
    problems = [problem for namespace in found.namespaces for problem in namespace.problems]
    return _end(problems, quiet=args.json)


def _verify(args: argparse.Namespace) -> int:
    check = _check()
    root = _root(args.dir)
    results: list[VerifyResult] = []
    for name in _names(check, root, args.namespace):
        results.append(check.verify(root, name, None if args.quiet else _progress(name)))
    if args.json:
        print(json.dumps({"root": str(root), "namespaces": [{**asdict(r), "ok": r.ok} for r in results]}))
    else:
        head = ("namespace", "good", "corrupt", "unreadable", "unfinished", "segments evicted meanwhile")
        rows = [
            (r.name, *(str(n) for n in (r.good, r.corrupt, r.unreadable, r.unfinished, r.vanished))) for r in results
        ]
        print_table(head, rows, figures=True)
    code = _end([problem for result in results for problem in result.problems], quiet=args.json)
    return code or int(not all(result.ok for result in results))


def _clear(args: argparse.Namespace) -> int:
    check = _check()
    root = _root(args.dir)
    results = [check.clear(root, name) for name in _names(check, root, args.namespace)]
    if args.json:
        print(json.dumps({"root": str(root), "namespaces": [asdict(result) for result in results]}))
    else:
        head = ("namespace", "segments removed", "GiB")
        print_table(head, [(r.name, str(r.segments), f"{r.bytes / _GIB:.2f}") for r in results], figures=True)
    return _end([result.refused for result in results if result.refused], quiet=args.json)


def _end(sentences: Sequence[str], *, quiet: bool) -> int:
    """Tell of what is not as it should be, which JSON has already; the exit code."""
    if not quiet:
        for sentence in sentences:
            print(sentence, file=sys.stderr)
    return int(bool(sentences))


def _stat_row(namespace: NamespaceStat) -> tuple[str, ...]:
    user = "-" if namespace.pid is None else f"process {namespace.pid}" if namespace.pid else "a process"
    return (
        namespace.name,
        str(namespace.blocks),
        f"{namespace.bytes / _GIB:.2f}",
        f"{namespace.segments} ({namespace.sealed} finished)",
        f"{namespace.block_bytes / (1 << 20):.2f}" if namespace.block_bytes else "-",
        _period(namespace.oldest, namespace.newest),
        user,
        namespace.about.get("dtype", "-"),
        namespace.about.get("layout", "-"),
    )


def _period(oldest: float | None, newest: float | None) -> str:
    if oldest is None or newest is None:
        return "-"
    first, last = (time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds)) for seconds in (oldest, newest))
    return first if first == last else f"{first} to {last}"


def _names(check: Any, root: Path, given: Iterable[str] | None) -> list[str]:
    """The namespaces to work on; a wrong name shows before anything is done."""
    known: list[str] = check.namespaces(root)
    if given is None:
        return known
    from vllm_pd.layered import nearest

    names = list(dict.fromkeys(given))
    for name in names:
        if name not in known:
            raise SettingsError(f"{root} has no namespace {name!r}{nearest(name, known)}; `tiers stat` lists them.")
    return names


def _root(folder: Path) -> Path:
    """Where the namespaces are: a folder of our own inside the one that servers are given.

    Raises:
        SettingsError: there is none.
    """
    from vllm_pd.kv_offload.ssd_config import ROOT_NAME

    folder = folder.expanduser()
    if (folder / ROOT_NAME).is_dir():
        return folder / ROOT_NAME
    if folder.name == ROOT_NAME and folder.is_dir():
        return folder
    raise SettingsError(
        f"{folder} has no folder {ROOT_NAME}, so no SSD tier was ever in it; name what servers got as --pd-ssd-path."
    )


def _check() -> Any:
    """The module that looks into stores."""
    from vllm_pd.kv_offload.segments import check

    return check


def _explained(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """A store needs numpy and, for checksums, numba: they come with vLLM, but not with a router."""

    def explained(args: argparse.Namespace) -> int:
        try:
            return run(args)
        except ModuleNotFoundError as e:
            if not any(name in str(e) for name in ("numba", "numpy")):
                raise
            raise SettingsError(
                f"Looking into an SSD tier needs a package that is missing here ({e}); run this where the worker "
                "runs, or pip install numba."
            ) from None

    return explained


def _progress(name: str) -> Callable[[int, int], None]:
    """One line on stderr that is written over; nothing when stderr is no terminal."""
    shown = [0.0]
    terminal = sys.stderr.isatty()

    def told(done: int, total: int) -> None:
        now = time.monotonic()
        if terminal and (done >= total or now - shown[0] >= _SHOW_EVERY_S):
            shown[0] = now
            end = "\n" if done >= total else ""
            print(f"\r{name}: {done / _GIB:.1f} of {total / _GIB:.1f} GiB", end=end, file=sys.stderr, flush=True)

    return told

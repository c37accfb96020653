"""`vllm-pd up`, `status`, `logs`, `scale`, `restart`, `down`: a graph on this machine."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from vllm_pd.console import natural
from vllm_pd.errors import GraphError, SettingsError
from vllm_pd.graph import control, launcher, log_files, read, runs, up_command
from vllm_pd.graph.control import Request, Restart, Scale
from vllm_pd.graph.runs import RunFolder
from vllm_pd.graph.status import GraphState, GraphStatus
from vllm_pd.graph.watcher import Watcher, print_status
from vllm_pd.interrupts import Interrupted, Interrupts
from vllm_pd.layered import nearest

_UP_EXAMPLES = """examples:
  vllm-pd up configs/disagg_router.yaml                          start it, and stay until Ctrl-C
  vllm-pd up configs/disagg_router.yaml --detach                 the same in the background
  vllm-pd up configs/agg.yaml --set model=Qwen/Qwen3-0.6B --set worker.count=2
  vllm-pd up configs/disagg_router.yaml --check                  what would be started, and whether it can be
  vllm-pd up configs/disagg_router.yaml --render kubernetes > cluster.yaml

exit status: 0 all is up (or was, until it was ended), 1 something did not come up, 2 the file is wrong
"""
_SCALE_EXAMPLES = """examples:
  vllm-pd scale decode=3                 two more, if there was one
  vllm-pd scale decode=2 prefill=2 --wait
"""
_LOGS_EXAMPLES = """examples:
  vllm-pd logs                           the last lines of every process
  vllm-pd logs decode -f                 of all decode workers, and what they go on writing
  vllm-pd logs prefill-0 -n 200
  vllm-pd logs supervisor                what the supervisor did
"""
_STATUS_EXAMPLES = "exit status: 0 all that is wanted is ready, 1 something is not, or no graph is up\n"
_GRAPH_HELP = "name of the graph, or its file; not needed where only one is up"
_POLL_S = 0.3


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands."""
    up = _command(commands, "up", up_command.run, "start the cluster of a graph file on this machine", _UP_EXAMPLES)
    up.add_argument("file", help="YAML file of the graph; see docs/graphs.md and configs/")
    up.add_argument(
        "--set", dest="sets", action="append", default=[], metavar="KEY=VALUE", help="change the file, for this run"
    )
    way = up.add_mutually_exclusive_group()
    way.add_argument("--detach", "-d", action="store_true", help="come back when all is up; it goes on running")
    way.add_argument("--check", action="store_true", help="start nothing: show what would be started, and where")
    way.add_argument("--render", choices=["kubernetes"], help="start nothing: write manifests of the same graph")
    up.add_argument("--output", type=Path, metavar="FILE", help="where --render writes to; default: standard output")
    up.add_argument("--json", action="store_true", help="with --check or --detach: print one JSON object")

    status = _command(commands, "status", _status, "show how the processes of a graph are", _STATUS_EXAMPLES)
    status.add_argument("graph", nargs="?", help=_GRAPH_HELP)
    status.add_argument("--json", action="store_true", help="print one JSON array")

    logs = _command(commands, "logs", _logs, "show what the processes of a graph write", _LOGS_EXAMPLES)
    logs.add_argument("names", nargs="*", metavar="NAME", help="components or processes; default: all")
    logs.add_argument("--graph", help=_GRAPH_HELP)
    logs.add_argument("--follow", "-f", action="store_true", help="go on until Ctrl-C, or until the graph is down")
    logs.add_argument("--lines", "-n", type=natural, default=20, metavar="N", help="of each log; default: 20")

    scale = _command(commands, "scale", _scale, "start more workers of a graph, or end some", _SCALE_EXAMPLES)
    scale.add_argument("wanted", nargs="+", type=_count, metavar="COMPONENT=COUNT")
    scale.add_argument("--graph", help=_GRAPH_HELP)
    scale.add_argument("--wait", action="store_true", help="come back when all that is wanted is up")

    restart = _command(commands, "restart", _restart, "start processes of a graph anew, also those that were given up")
    restart.add_argument("name", help="a process or a component")
    restart.add_argument("--graph", help=_GRAPH_HELP)

    down = _command(commands, "down", _down, "end a graph, also what is left of one whose supervisor was killed")
    down.add_argument("graph", nargs="?", help=_GRAPH_HELP)
    down.add_argument("--all", action="store_true", help="every graph of this user on this machine")
    down.add_argument("--now", action="store_true", help="without waiting for requests under way")


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, run: Any, text: str, examples: str = ""
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=examples or None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def _count(text: str) -> tuple[str, int]:
    name, equals, number = text.partition("=")
    if not (name and equals and number.isdigit()):
        raise argparse.ArgumentTypeError("must be COMPONENT=COUNT, for example decode=3")
    return name, int(number)


def _status(args: argparse.Namespace) -> int:
    folders = [_find(args.graph)] if args.graph else runs.known(os.environ)
    if not folders:
        print("No graph is up.", file=sys.stderr)
    found = [status for folder in folders if (status := _status_of(folder)) is not None]
    if args.json:
        print(msgspec.json.encode(found).decode())
    for number, status in enumerate([] if args.json else found):
        print("\n" if number else "", end="")
        print_status(status)
    return 0 if folders and len(found) == len(folders) and all(s.state is GraphState.UP for s in found) else 1


def _status_of(folder: RunFolder) -> GraphStatus | None:
    try:
        return control.status(folder)
    except GraphError as e:
        what = "what it left is being ended" if folder.is_locked() else f"vllm-pd down {folder.graph} cleans up"
        print(f"{e} Its supervisor was killed, or has just begun or ended; {what}.", file=sys.stderr)
        return None


def _logs(args: argparse.Namespace) -> int:
    folder = _find(args.graph, has_logs=True)
    followers = log_files.chosen(folder.logs, args.names)
    if not followers:
        there = [f.name for f in log_files.chosen(folder.logs, ())]
        near = "".join(nearest(name, there) for name in args.names)
        print(f"{folder.graph} has no such log{near}; there are: {', '.join(there) or 'none'}.", file=sys.stderr)
        return 1
    with contextlib.suppress(KeyboardInterrupt):
        _show_logs(folder, followers, args)
    return 0


def _show_logs(folder: RunFolder, followers: Sequence[log_files.Follower], args: argparse.Namespace) -> None:
    prefix = len(followers) > 1 or (args.follow and not args.names)
    width = max(len(f.name) for f in followers)

    def show(follower: log_files.Follower, lines: Sequence[str]) -> None:
        for line in lines:
            print(f"{follower.name:<{width}} | {line}" if prefix else line, flush=True)

    for follower in followers:
        show(follower, follower.last(args.lines))
    known = {f.name for f in followers}
    following = list(followers)
    while args.follow:
        was_up = folder.is_locked()
        # Instances that were added meanwhile are shown from their beginning.
        new = [f for f in log_files.chosen(folder.logs, args.names) if f.name not in known]
        known |= {f.name for f in new}
        following += new
        for follower in following:
            show(follower, follower.more())
        if not was_up:
            return
        time.sleep(_POLL_S)


def _scale(args: argparse.Namespace) -> int:
    folder = _find(args.graph)
    watcher = Watcher("Scaling")
    status = control.status(folder)
    watcher.skip(status)
    _check_wanted(args.wanted, status)
    for name, count in args.wanted:
        _ask(folder, Scale(name, count))
    if not args.wait:
        return 0
    with Interrupts() as interrupts:

        def watch(status: GraphStatus) -> None:
            watcher(status)
            interrupts.check()

        try:
            failed = launcher.failures(launcher.wait_until_up(folder, watch=watch))
        except Interrupted:
            return 130
    watcher.done("not all is up" if failed else "all is up")
    print("\n".join(failed), end="\n" if failed else "")
    return 1 if failed else 0


def _check_wanted(wanted: Sequence[tuple[str, int]], status: GraphStatus) -> None:
    """All or nothing: refuse before the first is scaled what the supervisor would refuse later. Raises GraphError."""
    components = {component.name: component for component in status.components}
    for name, count in wanted:
        if (component := components.get(name)) is None:
            raise GraphError(f"There is no component {name!r}{nearest(name, list(components))}; nothing was scaled.")
        if component.max and not component.min <= count <= component.max:
            raise GraphError(
                f"{name} may have {component.min} to {component.max} instances, not {count}; nothing was scaled."
            )


def _restart(args: argparse.Namespace) -> int:
    _ask(_find(args.graph), Restart(args.name))
    return 0


def _ask(folder: RunFolder, request: Request) -> None:
    reply = control.ask(folder, request)
    if not reply.ok:
        raise (SettingsError if reply.is_setting else GraphError)(reply.detail)
    print(reply.detail)


def _down(args: argparse.Namespace) -> int:
    folders = runs.known(os.environ) if args.all else [_find(args.graph)]
    if not folders:
        print("No graph is up.")
    is_clean = True
    with Interrupts() as interrupts:
        for folder in folders:
            try:
                is_clean &= _end(folder, interrupts, now=args.now)
            except GraphError as e:
                # The others are to be ended all the same.
                print(e, file=sys.stderr)
                is_clean = False
    return 0 if is_clean else 1


def _end(folder: RunFolder, interrupts: Interrupts, *, now: bool) -> bool:
    """Returns whether nothing was left. Raises GraphError when it does not end."""
    if folder.is_locked():
        return up_command.end(folder, interrupts, now=now)
    if launcher.clean(folder):
        print(f"{folder.graph}: what its killed supervisor left was ended.")
    else:
        print(f"{folder.graph}: its supervisor was killed, and nothing was left.")
    return True


def _find(graph: str | None, *, has_logs: bool = False) -> RunFolder:
    """The folder of the graph that a command is about.

    Raises:
        GraphError: there is none.
        SettingsError: there are several.
    """
    if graph is not None:
        if Path(graph).suffix in (".yaml", ".yml"):
            graph = read.load(graph, environ=os.environ).name
        folder = runs.folder_of(graph, os.environ)
        if not (folder.logs.is_dir() if has_logs else folder.record.exists() or folder.is_locked()):
            up = ", ".join(f.graph for f in runs.known(os.environ)) or "none"
            raise GraphError(f"The graph {graph} is not up; up are: {up}.")
        return folder
    folders = runs.known(os.environ) or (runs.ever(os.environ) if has_logs else [])
    if not folders:
        raise GraphError("No graph is up; vllm-pd up FILE starts one.")
    if len(folders) > 1:
        raise SettingsError(f"There are several graphs ({', '.join(f.graph for f in folders)}); say which one.")
    return folders[0]

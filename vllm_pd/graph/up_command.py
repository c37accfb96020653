"""`vllm-pd up`: from a file to a cluster that serves, with everything that happens on the way on the terminal."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from importlib import import_module
from pathlib import Path

import msgspec
import yaml

from vllm_pd.console import print_table
from vllm_pd.errors import GraphError, SettingsError
from vllm_pd.graph import check_machine, control, launcher, machine, processes, read, runs
from vllm_pd.graph.check import check
from vllm_pd.graph.check_serve import check_serve
from vllm_pd.graph.control import Stop
from vllm_pd.graph.embedded_store import find_binary
from vllm_pd.graph.launcher import Cluster
from vllm_pd.graph.model import Frontend, Graph, Store, Workers
from vllm_pd.graph.ports import LOOPBACK
from vllm_pd.graph.processes import Spot, Surroundings
from vllm_pd.graph.runs import RunFolder
from vllm_pd.graph.status import GraphStatus
from vllm_pd.graph.watcher import Watcher, print_ready
from vllm_pd.interrupts import Interrupted, Interrupts

_POLL_S = 0.3


def run(args: argparse.Namespace) -> int:
    """The command; returns its exit status."""
    if args.output is not None and not args.render:
        raise SettingsError(
            "--output says where --render writes to, and there is no --render; add --render kubernetes."
        )
    graph = check(read.load(args.file, sets=args.sets, environ=os.environ))
    if args.render:
        return _render(graph, args.output)
    if args.check:
        return _show_plan(graph, args.json)
    with Interrupts() as interrupts:
        return start(graph, interrupts, detach=args.detach, as_json=args.json)


def start(graph: Graph, interrupts: Interrupts, *, detach: bool = False, as_json: bool = False) -> int:
    """Start a graph; unless `detach`, stay until a signal and then end it."""

    def say(text: str) -> None:
        if not as_json:
            print(text, flush=True)

    say(f"{graph.name} on this machine ({machine.detect()}); logs are in {_folder_of(graph).logs}")
    cluster = launcher.start(graph, stays=detach)
    watcher = Watcher("Starting")

    def watch(status: GraphStatus) -> None:
        if not as_json:
            watcher(status)
        interrupts.check()

    failed: list[str] = []
    try:
        status = launcher.wait_until_up(cluster.folder, watch=watch)
        failed = launcher.failures(status)
        if as_json:
            print(msgspec.json.encode(status).decode())
        elif failed:
            watcher.done("not all is up; the rest stays as it is")
            print("\n".join(failed), file=sys.stderr)
        else:
            watcher.done("all is up")
            print_ready(status)
        if detach:
            cluster.leave_alone()
            say(f"It goes on in the background: vllm-pd status {graph.name}, vllm-pd down {graph.name}.")
            return 1 if failed else 0
        say("Ctrl-C ends everything.")
        _stay(cluster, watcher, interrupts, quiet=as_json)
    except Interrupted:
        pass
    except BaseException:
        # It ended meanwhile, or does not answer; either way nothing of it is to go on unseen.
        end(cluster.folder, interrupts, quiet=True)
        cluster.leave_alone()
        raise
    is_clean = end(cluster.folder, interrupts, quiet=as_json)
    cluster.leave_alone()
    return 0 if is_clean and not failed else 1


def end(folder: RunFolder, interrupts: Interrupts, *, now: bool = False, quiet: bool = False) -> bool:
    """End a graph; a Ctrl-C after the one that led here makes it quick. Returns whether nothing was left."""
    expected = max(interrupts.count, 1)
    watcher = Watcher(f"Ending {folder.graph}")

    def watch(status: GraphStatus) -> None:
        if interrupts.count > expected:
            with contextlib.suppress(GraphError):
                control.ask(folder, Stop(now=True))
        if not quiet:
            watcher(status)

    with contextlib.suppress(GraphError):
        watcher.skip(control.status(folder))
    left = launcher.stop(folder, now=now, watch=watch)
    if not quiet or left:
        watcher.done(f"left behind: {left}" if left else "nothing left behind")
    return not left


def _stay(cluster: Cluster, watcher: Watcher, interrupts: Interrupts, *, quiet: bool) -> None:
    """Tell what happens until a signal, or until somebody else has the graph ended."""
    while not interrupts.count and cluster.supervisor.poll() is None:
        with contextlib.suppress(GraphError):
            status = cluster.status()
            if not quiet:
                watcher.news(status)
        time.sleep(_POLL_S)


def _show_plan(graph: Graph, as_json: bool) -> int:
    """What cannot be known before the start has a stand-in: port 0 is a free one."""
    here = machine.detect()
    places = processes.places(graph, here)
    check_machine.check_models(graph)
    store = graph.store
    binary = find_binary() if store is not None and not store.url else None
    url = "" if store is None else store.url or f"redis://{LOOPBACK}:{store.port}"
    folder = _folder_of(graph)
    around = Surroundings(Path(sys.executable).parent, os.environ, folder.path, "", url, binary)
    is_up = folder.is_locked()
    rows, served = [], {}
    for wave, components in enumerate(processes.order(graph), start=1):
        for component in components:
            port = component.port if isinstance(component, Frontend | Store) else 0
            for number in range(processes.count_of(component)):
                name = processes.instance_name(component, number)
                spot = Spot(number, port + number if port else 0, places.get(name, processes.NO_PLACE))
                launch = processes.launch(graph, component, spot, around)
                # A graph that is up has its ports itself.
                if not is_up:
                    check_machine.check_port(name, component, spot.port)
                check_machine.check_program(launch)
                rows.append((wave, name, str(spot.place), processes.shown(launch)))
                if isinstance(component, Workers):
                    # After the program and its command.
                    served[component.label] = launch.command[2:]
    if not as_json:
        print("Asking vLLM whether it knows what workers are told; it takes a while to load.", file=sys.stderr)
    options = check_serve(served)
    if as_json:
        plan = [dict(zip(("wave", "process", "on", "command"), row, strict=True)) for row in rows]
        print(json.dumps({"graph": graph.name, "machine": str(here), "processes": plan, "options": options}))
        return 0
    print(f"{graph.name} can be started on this machine ({here}):\n")
    print_table(("order", "process", "on"), [(str(wave), name, place or "-") for wave, name, place, _ in rows])
    print()
    for _, name, _, command in rows:
        print(f"{name}: {command}")
    print(f"\n{options}")
    return 0


def _render(graph: Graph, output: Path | None) -> int:
    documents = import_module("vllm_pd.graph.kubernetes").render(graph)
    text = yaml.safe_dump_all(documents, sort_keys=False, explicit_start=True, width=120)
    if output is None:
        print(text, end="")
    else:
        try:
            output.write_text(text, encoding="utf-8")
        except OSError as e:
            raise GraphError(f"{output} cannot be written ({e.strerror}); choose another --output.") from None
    return 0


def _folder_of(graph: Graph) -> RunFolder:
    return runs.folder_of(graph.name, os.environ)

"""Graphs that cannot work are refused before anything is started, in a sentence that says what to change."""

from __future__ import annotations

import re

import pytest

from vllm_pd.errors import SettingsError
from vllm_pd.graph.check import check
from vllm_pd.graph.model import (
    Component,
    Decode,
    Frontend,
    Graph,
    Limits,
    Link,
    Planner,
    Prefill,
    Router,
    Store,
    Worker,
)

F, R, D, P, W, S = Frontend(), Router(), Decode(), Prefill(), Worker(), Store()


def graph(*components: Component, links: str = "", name: str = "g", model: str = "m") -> Graph:
    """`links`: `frontend>router router>decode`."""
    pairs = [pair.split(">") for pair in links.split()]
    return Graph(name, model, components, tuple(Link(a, b) for a, b in pairs))


ALL = "frontend>router router>decode decode>prefill"


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            graph(F, R, D, P, links=ALL),
            "the router finds its workers in a store, and the graph has none",
        ),
        (graph(F, W, Planner(), links="frontend>worker"), "the planner finds its workers in a store"),
        (graph(F, R, S, D, links="frontend>router router>decode"), "the decode has nobody that prefills for it"),
        (graph(F, R, S, W, P, links="frontend>router router>worker"), "Nothing leads to the prefill; link a decode"),
        (graph(F, R, S, P, links="frontend>router router>prefill"), "the router leads to no workers that answer"),
        (graph(F, S, links=""), "The graph has no workers"),
        (graph(R, S, D, P, links="router>decode decode>prefill"), "no frontend, so clients have nothing to ask"),
        (graph(F, R, S, W, links="frontend>worker router>worker"), "Nothing leads to the router; link frontend to it"),
        (
            graph(F, R, S, W, links="frontend>router frontend>worker router>worker"),
            "frontend is linked to router and to worker; requests for worker go through router",
        ),
        (graph(F, W, W, links="frontend>worker"), "Two components are called 'worker'"),
        (graph(F, Frontend(name="f2"), W, links="frontend>worker"), "There may be one frontend in a graph"),
        (graph(F, W, links="frontend>wroker"), "there is no component 'wroker' (did you mean 'worker'?)"),
        (graph(F, W, links="frontend>worker frontend>worker"), "frontend is linked to worker twice"),
        (graph(F, W, links="frontend>worker worker>frontend"), "the worker cannot be linked to the frontend"),
        (graph(F, D, P, links="frontend>decode decode>prefill prefill>decode"), "a prefill may be linked to store"),
        (graph(F, W, links="frontend>worker", name="My graph"), "The graph's name 'My graph' must be"),
        (graph(F, Worker(name="A"), links="frontend>A"), "The name 'A' of a component must be"),
        (graph(F, W, links="frontend>worker", model=""), "the worker has no model"),
        (
            graph(F, Decode(model="a"), P, links="frontend>decode decode>prefill"),
            "decode serves a and prefill, which is to prefill for it, m; give both the same model",
        ),
        (
            graph(F, Worker(5, limits=Limits(0, 4)), links="frontend>worker"),
            "count of worker is 5 and its limits",
        ),
        (graph(F, Worker(limits=Limits(4, 1)), links="frontend>worker"), "min 4 is above max 1"),
        (graph(F, Worker(gpus=1.5), links="frontend>worker"), "gpus of worker must be a whole number, or a fraction"),
        (
            graph(F, Worker(gpus=2, args=("-tp", "2", "--pipeline-parallel-size=2")), links="frontend>worker"),
            "args of worker spread the model over 4 GPUs, and gpus is 2; set gpus: 4",
        ),
        (graph(F, Worker(args=("--port", "1")), links="frontend>worker"), "args of worker hold --port, and the graph"),
        (graph(F, Worker(args=("--pd_store=x",)), links="frontend>worker"), "it is the store component; drop it"),
        (graph(F, Worker(settings={"role": "both"}), links="frontend>worker"), "given by the component's kind"),
        (
            graph(F, Worker(settings={"cpu_gb": 1}), links="frontend>worker"),
            "settings of worker has the unknown key 'cpu_gb' (did you mean 'cpu_gib'?)",
        ),
        (graph(F, Worker(settings={"ssd_gib": 1}), links="frontend>worker"), "add --pd-ssd-path"),
        (
            graph(Frontend(settings={"polcy": "x"}), W, links="frontend>worker"),
            "settings of frontend has the unknown key 'polcy' (did you mean 'policy'?)",
        ),
        (
            graph(Frontend(settings={"policy": "x"}), W, links="frontend>worker"),
            "policy in settings of frontend must",
        ),
        (graph(Frontend(settings={"port": 1}), W, links="frontend>worker"), "given by port of the frontend"),
        (
            graph(
                Frontend(settings={"seed": 1}),
                Router(settings={"seed": 1}),
                S,
                W,
                links="frontend>router router>worker",
            ),
            "seed is set for the frontend and for the router, which are one program here",
        ),
        (graph(Frontend(args=("--store", "x")), W, links="frontend>worker"), "args of frontend hold --store"),
        (graph(F, Store(url="redis://h:1", port=1), W, links="frontend>worker"), "the store has a url, so it is not"),
        (graph(F, Worker(env={"A B": "1"}), links="frontend>worker"), "is no name of a variable"),
        (graph(F, Worker(env={"A": "1"}, secrets=("A",)), links="frontend>worker"), "has A in env and in secrets"),
        (
            graph(F, R, S, W, Planner(settings={"moed": "x"}), links="frontend>router router>worker"),
            "settings of planner has the unknown key 'moed' (did you mean 'mode'?)",
        ),
        (
            graph(F, R, S, W, Planner(args=("--moed=scale",)), links="frontend>router router>worker"),
            "args of planner hold '--moed', which is no option of its program (did you mean '--mode'?)",
        ),
        (
            graph(F, R, S, W, Planner(args=("--mode", "x")), links="frontend>router router>worker"),
            "--mode must be one of fixed, scale, got 'x'",
        ),
        (graph(Frontend(args=("--polcy", "x")), W, links="frontend>worker"), "(did you mean '--policy'?)"),
        (graph(Frontend(args=("--policy", "x")), W, links="frontend>worker"), "--policy must be one of"),
        (graph(Frontend(args=("--policy",)), W, links="frontend>worker"), "args of frontend hold --policy without a v"),
        (
            graph(Frontend(args=("--api-key=hunter2",)), W, links="frontend>worker"),
            "name the variable VLLM_PD_ROUTER_API_KEY in its secrets instead",
        ),
        (
            graph(F, Worker(args=("--api-key", "hunter2")), links="frontend>worker"),
            "args of worker hold --api-key, and arguments can be read by everybody on the machine; name the variable "
            "VLLM_API_KEY in its secrets",
        ),
        (
            graph(F, Worker(args=("--pd-cpu-gb", "1")), links="frontend>worker"),
            "args of worker hold --pd-cpu-gb, which is no option (did you mean '--pd-cpu-gib'?)",
        ),
        (graph(Frontend(port=65535, count=2), W, links="frontend>worker"), "65535 is the last one; choose a lower"),
        (
            graph(Frontend(port=7000, count=2), W, Store(port=7001), links="frontend>worker"),
            "frontend and store are both to listen on port 7001",
        ),
        (
            graph(F, R, S, W, Planner(settings={"metrics_port": 8080}), links="frontend>router router>worker"),
            "frontend and planner are both to listen on port 8080",
        ),
        (graph(F, W, Store(settings={"port": 7}), links="frontend>worker"), "set port, which is given by port of the"),
        (graph(F, W, Store(settings={"requirepass": "x"}), links="frontend>worker"), "set requirepass, which is given"),
        (graph(F, W, Store(settings={"Daemonize": True}), links="frontend>worker"), "set daemonize, which is given by"),
        (graph(F, W, Store(args=("--dir", "/")), links="frontend>worker"), "args of store hold --dir, which the graph"),
        (
            graph(F, W, Store(settings={"save": ["900 1"]}), links="frontend>worker"),
            "save in settings of store must be a text or a number on one line",
        ),
        (
            graph(F, Worker(env={"VLLM_PD_STORE": "x"}), links="frontend>worker"),
            "worker names the variable VLLM_PD_STORE, which is given by the store component; drop it",
        ),
        (graph(F, Worker(env={"PD_GRAPH_RUN": "x"}), links="frontend>worker"), "which is given by the supervisor"),
    ],
    ids=lambda value: None if isinstance(value, Graph) else value[:40],
)
def test_a_graph_that_cannot_work_is_refused(made: Graph, message: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(message)):
        check(made)


@pytest.mark.parametrize(
    "made",
    [
        graph(F, W, links="frontend>worker"),
        graph(F, D, P, links="frontend>decode decode>prefill"),
        graph(F, R, S, D, P, links="frontend>router router>decode router>prefill"),
        graph(F, R, S, W, P, links="frontend>router router>worker worker>prefill"),
        graph(F, R, S, D, P, links=ALL + " router>store decode>store"),
        graph(F, R, S, W, Planner(settings={"mode": "scale"}), links="frontend>router router>worker planner>worker"),
        graph(F, Worker(gpus=4, args=("--tensor-parallel-size", "4")), links="frontend>worker"),
        graph(F, Worker(0, gpus=0.5), links="frontend>worker"),
        graph(Frontend(args=("--policy=prefix", "--require-prefill")), W, links="frontend>worker"),
        graph(Frontend(settings={"shutdown_grace": None}), W, links="frontend>worker"),
    ],
)
def test_a_graph_that_can_work_passes(made: Graph) -> None:
    assert check(made) is made

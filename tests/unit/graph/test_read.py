"""Graphs from files: what they may say, and what is said about mistakes in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_pd.errors import SettingsError
from vllm_pd.graph.check import check
from vllm_pd.graph.model import (
    Decode,
    Frontend,
    Graph,
    Limits,
    Planner,
    Prefill,
    RestartRule,
    Router,
    Store,
    Worker,
)
from vllm_pd.graph.read import from_mapping, load, override, to_mapping

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("*.yaml"))

TEXT = """
graph: mine
model: ${MODEL:-org/model}
namespace: blue
restart: {tries: 3, longest_delay_s: 30}
workers:
  args: {max-model-len: 4096, trust-remote-code: true, enable-log-requests: false, lora-modules: [a=b, c=d]}
  env: {A: 1}
components:
  frontend: {port: 9000, links: router}
  router: {links: [big], settings: {policy: prefix}}
  big: {kind: decode, count: 2, gpus: 4, links: [prefill], args: [--seed, 7], env: {B: x}, limits: {min: 1, max: 4}}
  prefill: {settings: {cpu-gib: 4}, secrets: [HF_TOKEN]}
  store: {port: 7000}
"""


def read(text: str, *sets: str, tmp_path: Path, **environ: str) -> Graph:
    file = tmp_path / "graph.yaml"
    file.write_text(text)
    return load(str(file), sets=sets, environ=environ)


def test_a_file_becomes_a_graph(tmp_path: Path) -> None:
    shared = (
        "--max-model-len",
        "4096",
        "--trust-remote-code",
        "--no-enable-log-requests",
        "--lora-modules",
        "a=b",
        "c=d",
    )
    made = (
        Frontend(port=9000)
        .link(Router(settings={"policy": "prefix"}))
        .link(
            Decode(2, name="big", gpus=4, args=(*shared, "--seed", "7"), env={"A": "1", "B": "x"}, limits=Limits(1, 4))
        )
        .link(Prefill(settings={"cpu-gib": 4}, args=shared, env={"A": "1"}, secrets=("HF_TOKEN",)))
        .beside(Store(port=7000))
        .graph("mine", model="org/model", namespace="blue", restart=RestartRule(tries=3, longest_delay_s=30))
    )
    assert read(TEXT, tmp_path=tmp_path) == made
    assert check(made) is made


def test_what_is_merged_in_may_be_replaced(tmp_path: Path) -> None:
    text = "components:\n  a: &a {kind: decode, count: 2, gpus: 4}\n  b: &b {<<: *a, count: 3}\n  c: {<<: *b, gpus: 1}"
    a, b, c = read(f"model: m\n{text}", tmp_path=tmp_path).components
    assert isinstance(a, Decode) and isinstance(b, Decode) and isinstance(c, Decode)
    assert [(each.count, each.gpus) for each in (a, b, c)] == [(2, 4), (3, 4), (3, 1)]


def test_variables_of_the_environment_stand_in_for_text(tmp_path: Path) -> None:
    assert read(TEXT, tmp_path=tmp_path, MODEL="m").model == "m"
    assert read("model: a$$b\ncomponents: {worker: {}}", tmp_path=tmp_path).model == "a$b"
    with pytest.raises(SettingsError, match=r"uses \$\{NOPE\}, and that variable is not set"):
        read("model: ${NOPE}\ncomponents: {worker: {}}", tmp_path=tmp_path)


def test_a_file_without_a_name_gives_the_graph_its_own(tmp_path: Path) -> None:
    (tmp_path / "My_cluster.yaml").write_text("model: m\ncomponents: {worker: {}}")
    assert load(str(tmp_path / "My_cluster.yaml"), environ={}).name == "my-cluster"


def test_what_is_set_by_hand_goes_before_the_file(tmp_path: Path) -> None:
    graph = read(
        TEXT, "big.count=1", "model=x", "workers.args.max-model-len=1", "router.settings.policy=round-robin",
        "store.url=redis://h:1", "store.port=0", tmp_path=tmp_path,
    )  # fmt: skip
    big = graph.component("big")
    assert isinstance(big, Decode)
    assert (graph.model, big.count, big.args[:2]) == ("x", 1, ("--max-model-len", "1"))
    assert graph.router is not None and graph.router.settings == {"policy": "round-robin"}
    assert graph.store is not None and graph.store.url == "redis://h:1"


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("count", "must be KEY=VALUE"),
        ("decod.count=1", r"the graph has no 'decod' \(did you mean 'decode'\?\)"),
        ("decode.count=010", "010 is the number 8 to YAML"),
        ("decode.args.seed=1", r"components\.decode\.args is no mapping but \['--x'\]; set it as a whole"),
    ],
)
def test_a_wrong_change_is_refused(assignment: str, message: str) -> None:
    data = {"components": {"decode": {"args": ["--x"]}}}
    with pytest.raises(SettingsError, match=message):
        override(data, assignment)
    assert data == {"components": {"decode": {"args": ["--x"]}}}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("modell: x", r"unknown key 'modell' \(did you mean 'model'\?\)"),
        ("components: {decoder: {}}", r"components.decoder names no kind of component \(did you mean 'decode'\?\)"),
        ("components: {decode: {cuont: 2}}", r"unknown key 'cuont' \(did you mean 'count'\?\)"),
        ("components: {decode: {count: two}}", "count of components.decode must be a number"),
        (
            "components: {decode: {kind: decod}}",
            r"kind of components.decode must be .*\(did you mean 'decode'\?\)",
        ),
        ("components: {store: {url: 'http://x'}}", "url of components.store cannot be used"),
        ("components: {decode: {args: 3}}", "args of components.decode must be a list of arguments or a mapping"),
        ("components: {decode: {args: {a: {b: 1}}}}", "a in args of components.decode must be a text or a number"),
        ("components: {decode: {links: 3}}", "links of components.decode must be a list of names"),
        ("components: {router: {count: 2}}", "components.router has the unknown key 'count'"),
        ("components: {decode: {limits: {maxx: 2}}}", r"unknown key 'maxx' \(did you mean 'max'\?\)"),
        ("components: 3", "components must hold keys and values"),
        ("components: {}", "has no components"),
        ("restart: {tries: -1}", "tries of restart must be a number at least 0"),
        ("workers: {count: 2}", "workers has the unknown key 'count'"),
        (
            "workers: {env: {DEBUG: yes}}",
            "DEBUG in env of workers must be a text or a number, got True; write it in quo",
        ),
        ("components: {decode: {count: 010}}", "line 2: 010 is the number 8 to YAML; write that, or '010' if it is a"),
        ("components: {decode: {args: [1:30]}}", "1:30 is the number 90 to YAML"),
        ("components: {decode: {}, prefill: {}, decode: {count: 2}}", "line 2: the key 'decode' is there twice"),
    ],
)
def test_a_mistake_in_the_file_is_named(line: str, message: str, tmp_path: Path) -> None:
    text = line if "components" in line else f"{line}\ncomponents: {{worker: {{}}}}"
    with pytest.raises(SettingsError, match=message):
        read(f"graph: g\n{text}", tmp_path=tmp_path)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_graphs_that_come_with_the_project_are_right(path: Path) -> None:
    graph = check(load(str(path), environ={}))
    # The way in which a supervisor is told of a graph.
    assert from_mapping(json.loads(json.dumps(to_mapping(graph))), "x") == graph


def test_the_four_graphs_are_there() -> None:
    assert {"agg", "agg_router", "disagg", "disagg_router"} <= {path.stem for path in CONFIGS}


def test_the_same_graph_in_python_needs_no_store_to_be_named() -> None:
    graph = check(Frontend().link(Router()).link(Decode(2)).link(Prefill(1)).graph("g", model="m"))
    assert graph.store == Store()
    assert from_mapping(to_mapping(graph), "x") == graph
    assert Frontend().link(Worker()).graph("g", model="m").store is None


def test_a_planner_stands_beside_and_branches_come_together_again() -> None:
    chain = Frontend().link(Router()).link(Decode(name="a"), Decode(name="b")).link(Prefill()).beside(Planner())
    graph = check(chain.graph("g", model="m"))
    assert [(link.source, link.target) for link in graph.links] == [
        ("frontend", "router"), ("router", "a"), ("router", "b"), ("a", "prefill"), ("b", "prefill"),
    ]  # fmt: skip

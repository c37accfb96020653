"""A part of the fault matrix in a minute: mock workers, a real router and store, faults that need no model.

`make test-faults` runs all of it on real vLLM.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator

import pytest

from tests.faults import scenes
from tests.faults.cluster import MOCK_MODEL, Cluster, eventually
from tests.faults.injections import QUICK, Fault, Target
from tests.faults.matrix import SETTLE_S, run_row
from tests.faults.questions import Question
from tests.faults.scenes import Scene
from vllm_pd.state.base import Role

pytestmark = [pytest.mark.timeout(180)]

CLIENTS = 8
CELLS = [
    (Target.PREFILL, Fault.KILL),
    (Target.DECODE, Fault.KILL),
    (Target.DECODE, Fault.STOP),
    (Target.ROUTER, Fault.TERM),
    (Target.STORE, Fault.RESTART),
    (Target.STORE, Fault.STOP),
    (Target.STORE, Fault.RESET),
]
SPLIT = ("--disagg", "always")
WORKERS = ("--speed", "4", "--max-num-seqs", "8")


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, list[Question], Scene]]:
    """A cluster whose prefill workers came later, and how that went."""
    made = Cluster(None, tmp_path_factory.mktemp("faults"), prefill=0, decode=2, worker_args=WORKERS, router_args=SPLIT)
    with made:
        asked = [ask(made, number) for number in range(12)]
        yield made, asked, scenes.prefill_comes_later(made, asked, prefill=2, clients=CLIENTS)
    assert not made.left


@pytest.fixture(scope="module")
def cluster(late: tuple[Cluster, list[Question], Scene]) -> Cluster:
    return late[0]


@pytest.fixture(scope="module")
def questions(late: tuple[Cluster, list[Question], Scene]) -> list[Question]:
    return late[1]


def ask(cluster: Cluster, number: int) -> Question:
    body = {"prompt": f"What is {number} worth? " * (4 + number), "temperature": 0, "max_tokens": 4 + 4 * number}
    request = urllib.request.Request(
        f"{cluster.of_role(Role.DECODE)[0].url}/v1/completions",
        json.dumps({"model": MOCK_MODEL, **body}).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        choice = json.load(answer)["choices"][0]
    return Question("/v1/completions", body, choice["text"], choice["finish_reason"])


def test_decode_workers_serve_before_prefill_workers_come(late: tuple[Cluster, list[Question], Scene]) -> None:
    assert not late[2].wrongs


def test_a_cold_burst_is_served(cluster: Cluster, questions: list[Question]) -> None:
    assert not scenes.cold_burst(cluster, questions).wrongs
    assert eventually(lambda: not cluster.unsettled(), SETTLE_S), cluster.unsettled()


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_worker_joins_and_leaves_under_load(cluster: Cluster, questions: list[Question], role: Role) -> None:
    assert not scenes.comes_and_goes(cluster, questions, role, CLIENTS).wrongs
    assert eventually(lambda: not cluster.unsettled(), SETTLE_S), cluster.unsettled()


@pytest.mark.parametrize(("target", "fault"), CELLS, ids=lambda each: str(each).replace(" ", "_"))
def test_nothing_is_lost_that_could_be_served(
    cluster: Cluster, questions: list[Question], target: Target, fault: Fault
) -> None:
    row = run_row(cluster, target, fault, questions, CELLS.index((target, fault)), clients=CLIENTS, pace=QUICK)
    assert not row.wrongs, "\n".join(row.wrongs)

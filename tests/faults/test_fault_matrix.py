"""The fault matrix on real vLLM processes, written to `docs/fault-matrix.md` once every part of it was run.

`make test-faults` runs it. Single cells: `-k "decode and SIGKILL"`; the page then has their new results beside the last
ones of the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.ask import Endpoint
from tests.faults import scenes
from tests.faults.aborts import run_aborts
from tests.faults.cluster import Cluster, eventually
from tests.faults.injections import MATRIX, Fault, Target
from tests.faults.matrix import SETTLE_S, run_row
from tests.faults.questions import Question, pool
from tests.faults.results import Results
from tests.faults.scenes import Scene
from tests.faults.table import page
from vllm_pd.state.base import Role

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500)]

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "fault-matrix.md"
KEPT = ROOT / ".cache" / "fault-matrix.json"
QUESTIONS = 48
MIN_REQUESTS = 2000
SPLIT = ("--disagg", "always")
"""With so small a model the hand-over seldom pays, and it is what may fail here."""
JOIN_CLIENTS = 4
"""So many that there is always work, so few that workers that start beside it do so in a minute or two."""
ABORTS_EACH = 4
ABORTS_S = 150.0


@dataclass(slots=True)
class Stage:
    cluster: Cluster
    questions: list[Question]
    found: Results
    late: Scene


@pytest.fixture(scope="module")
def stage(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """The cluster, whose prefill workers came later than everything else."""
    logs = tmp_path_factory.mktemp("faults")
    made = Cluster(tiny_model, logs, prefill=0, decode=2, router_args=SPLIT)
    found = Results.load(KEPT)
    with made:
        questions = pool(Endpoint(made.of_role(Role.DECODE)[0].url, made.model), QUESTIONS)
        late = scenes.prefill_comes_later(made, questions, prefill=2, clients=JOIN_CLIENTS)
        found.took(late)
        yield Stage(made, questions, found, late)
    assert not made.left
    found.save(KEPT)
    if found.is_whole:
        PAGE.write_text(page(found))


def test_decode_workers_serve_before_prefill_workers_come(stage: Stage) -> None:
    assert not stage.late.wrongs, "\n".join(stage.late.wrongs)


def test_a_cold_burst_on_a_fresh_cluster(stage: Stage) -> None:
    scene = scenes.cold_burst(stage.cluster, stage.questions)
    stage.found.took(scene)
    assert not scene.wrongs, "\n".join(scene.wrongs)
    assert eventually(lambda: not stage.cluster.unsettled(), SETTLE_S), stage.cluster.unsettled()


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_worker_joins_and_leaves_under_load(stage: Stage, role: Role) -> None:
    scene = scenes.comes_and_goes(stage.cluster, stage.questions, role, JOIN_CLIENTS)
    stage.found.took(scene)
    assert not scene.wrongs, "\n".join(scene.wrongs)
    assert eventually(lambda: not stage.cluster.unsettled(), SETTLE_S), stage.cluster.unsettled()


def test_a_client_that_leaves_frees_everything_in_whatever_phase(stage: Stage) -> None:
    aborts = run_aborts(stage.cluster, stage.questions, each=ABORTS_EACH, seconds=ABORTS_S)
    stage.found.took(aborts)
    print(f"\nleft {aborts.left}, let go after {aborts.let_go_after}, settled after {aborts.settled_after:.1f} s")
    assert not aborts.wrongs, "\n".join(aborts.wrongs)


@pytest.mark.parametrize(("target", "fault"), MATRIX, ids=lambda each: str(each).replace(" ", "_"))
def test_cell(stage: Stage, target: Target, fault: Fault) -> None:
    number = MATRIX.index((target, fault))
    row = run_row(stage.cluster, target, fault, stage.questions, number, at_least=MIN_REQUESTS // len(MATRIX) + 1)
    stage.found.took(row)
    stage.found.save(KEPT)
    print(f"\n{json.dumps(row.as_dict())}")
    assert not row.wrongs, "\n".join(row.wrongs)


def test_enough_requests_were_sent(stage: Stage) -> None:
    if not stage.found.is_whole:
        pytest.skip("only a part of the matrix was run")
    assert sum(row.requests for row in stage.found.rows.values()) >= MIN_REQUESTS

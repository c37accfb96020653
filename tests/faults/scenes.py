"""What is no fault and still goes wrong easily: cold bursts, workers that come and go, workers in the wrong order."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.faults.cluster import Cluster, Member, eventually
from tests.faults.injections import DRAIN_S
from tests.faults.load import Load
from tests.faults.matrix import DEADLINE_S
from tests.faults.questions import Question
from tests.faults.shot import Outcome, Shot
from vllm_pd.graph import metrics_text
from vllm_pd.state.base import Role

BURST = 32
_WARM = 4
_AFTER_S = 3.0


@dataclass(slots=True)
class Scene:
    """Requests of a scene and what must not be. Times are seconds."""

    name: str
    requests: int = 0
    slowest: float = 0.0
    wrongs: list[str] = field(default_factory=list)

    def take(self, shots: Sequence[Shot]) -> None:
        """All of these must have been answered rightly."""
        self.requests += len(shots)
        self.slowest = max([self.slowest, *(shot.ended - shot.sent for shot in shots)])
        self.wrongs += [shot.describe() for shot in shots if shot.outcome is not Outcome.OK]


def cold_burst(cluster: Cluster, questions: Sequence[Question]) -> Scene:
    """32 requests at once that no cache can help."""
    scene = Scene(f"cold burst of {BURST}")
    load = _load(cluster, questions, clients=BURST, label="burst", cold=1.0).start()
    eventually(lambda: len(load.shots) >= BURST, DEADLINE_S)
    scene.take(load.stop())
    return scene


def comes_and_goes(cluster: Cluster, questions: Sequence[Question], role: Role, clients: int) -> Scene:
    """A worker joins under load, takes part, and leaves again by SIGTERM."""
    scene = Scene(f"a {role} worker joins and leaves")
    with _load(cluster, questions, clients=clients, label=f"join{role}") as load:
        _warm(load)
        member = cluster.launch(role)
        cluster.wait_for(member)
        cluster.wait_whole()
        if not eventually(lambda: _took_part(member), DEADLINE_S):
            scene.wrongs.append(f"{member.name} got no request")
        member.process.terminate()
        if not eventually(lambda: not member.process.is_running, DRAIN_S):
            scene.wrongs.append(f"{member.name} did not end within {DRAIN_S:.0f} s after SIGTERM")
        cluster.forget(member)
        time.sleep(_AFTER_S)
    scene.take(load.shots)
    return scene


def prefill_comes_later(cluster: Cluster, questions: Sequence[Question], prefill: int, clients: int) -> Scene:
    """Decode workers and the router serve alone, and prefill workers join them under load."""
    scene = Scene("decode workers up before prefill workers")
    if cluster.of_role(Role.PREFILL):
        scene.wrongs.append("there was a prefill worker already")
    with _load(cluster, questions, clients=clients, label="late") as load:
        _warm(load)
        for member in [cluster.launch(Role.PREFILL) for _ in range(prefill)]:
            cluster.wait_for(member)
        cluster.wait_whole()
        if not eventually(lambda: all(_took_part(member) for member in cluster.of_role(Role.PREFILL)), DEADLINE_S):
            scene.wrongs.append("a prefill worker got no request")
    page = cluster.router_metrics()
    if not page.value("vllm_pd_router_bypass_total", reason="no_prefill_worker"):
        scene.wrongs.append("requests that went whole for lack of a prefill worker were not counted")
    if not page.value("vllm_pd_router_split_total"):
        scene.wrongs.append("no request was split after the prefill workers had come")
    scene.take(load.shots)
    return scene


def _load(cluster: Cluster, questions: Sequence[Question], *, clients: int, label: str, cold: float = 0.5) -> Load:
    return Load(
        cluster.router_url,
        cluster.model,
        questions,
        clients=clients,
        deadline_s=2 * DEADLINE_S,
        cold=cold,
        label=label,
    )


def _warm(load: Load) -> None:
    assert eventually(lambda: sum(bool(shot.ended) for shot in list(load.shots)) >= _WARM, DEADLINE_S)


def _took_part(member: Member) -> bool:
    return metrics_text.scrape(member.url).value("vllm:prompt_tokens_total") > 0

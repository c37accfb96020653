"""Simulated workers that come, go and change roles: nothing is lost that need not be, and everything is counted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from vllm_pd.errors import SettingsError
from vllm_pd.planner.config import PlannerConfig, Rule
from vllm_pd.planner.memory import Memory
from vllm_pd.planner.model import Action, AddAction, GiveUp, Mode, MoveAction, Plan, PoolView, RemoveAction
from vllm_pd.sim.cluster import Cluster, ClusterConfig
from vllm_pd.sim.planned import PlannedCluster
from vllm_pd.sim.planned_config import Life, PlannedConfig
from vllm_pd.sim.planned_report import mean_itl, planned_table, summarize_planned
from vllm_pd.sim.planned_run import PlannedRun, State
from vllm_pd.sim.trace import TraceRequest, make_trace
from vllm_pd.state.base import Epoch, Role, WorkerId

PLANNER = PlannerConfig(interval_s=5.0)
LONG_ANSWER = 2000
"""Tokens; some 12 seconds on an idle worker."""

Decide = Callable[[PoolView], tuple[Action | GiveUp, ...]]


def planned(
    trace: list[TraceRequest], decide: Decide | None = None, *, prefill: int = 2, decode: int = 2, **life: Any
) -> PlannedRun:
    """Simulate; `decide` stands in for the planner."""

    def step(view: PoolView, memory: Memory) -> tuple[Plan, Memory]:
        made = decide(view) if decide is not None else ()
        actions = tuple(each for each in made if not isinstance(each, GiveUp))
        return Plan(view.at_s, actions, tuple(each for each in made if isinstance(each, GiveUp))), memory

    cluster = ClusterConfig(workers=0, prefill=prefill, decode=decode)
    config = PlannedConfig(cluster, PLANNER, ttft_s=1.0, itl_s=0.02, life=Life(**life))
    return PlannedCluster(config, step).simulate_planned(trace)


def requests(seconds: int, *, per_second: int = 2, prompt: int = 600, output: int = 200) -> list[TraceRequest]:
    return [TraceRequest(i / per_second, prompt, output, ()) for i in range(seconds * per_second)]


def once(at: float, *actions: Action | GiveUp) -> Decide:
    """These, in the first step at or after a time."""
    done: list[bool] = []

    def decide(view: PoolView) -> tuple[Action | GiveUp, ...]:
        if view.at_s < at or done:
            return ()
        done.append(True)
        return actions

    return decide


def move(number: int, to: Role, epoch: int = 1) -> MoveAction:
    return MoveAction(WorkerId(f"w{number}"), Epoch(epoch), to, "a test")


def remove(number: int) -> RemoveAction:
    return RemoveAction(WorkerId(f"w{number}"), Epoch(1), "a test")


def test_without_changes_the_figures_are_those_of_a_plain_cluster() -> None:
    trace = make_trace(sessions=20, turns=3, rate=3.0, seed=1)
    config = ClusterConfig(workers=0, prefill=2, decode=2)
    plain = Cluster(config).simulate(trace)
    assert PlannedCluster(PlannedConfig(config)).simulate_planned(trace).run.served == plain.served


class TestMoves:
    def test_a_worker_that_moved_does_the_work_of_its_new_role_and_no_request_notices(self) -> None:
        run = planned(requests(60), once(10, move(3, Role.PREFILL)))
        assert len(run.moves) == 1 and run.undone == 0
        assert len(run.run.served) == run.arrivals
        late = [served for served in run.run.served if served.arrived > 30]
        assert {served.prefiller for served in late} >= {2} and {served.worker for served in late} == {3}
        assert [m.role for m in run.members] == [Role.PREFILL, Role.PREFILL, Role.PREFILL, Role.DECODE]

    def test_streams_that_do_not_end_in_time_go_on_elsewhere(self) -> None:
        trace = requests(20, per_second=1, output=LONG_ANSWER)
        run = planned(trace, once(10, move(3, Role.PREFILL)), move_timeout=20.0, hand_over_part=0.1, continuable=1.0)
        assert run.handed_over > 0 and len(run.run.served) == len(trace)
        assert run.moves == [pytest.approx(2.0, abs=0.1)]
        assert all(served.output == LONG_ANSWER for served in run.run.served)

    def test_a_stream_that_was_handed_over_pays_for_the_pause(self) -> None:
        trace = requests(1, per_second=1, output=LONG_ANSWER)
        (alone,) = planned(trace).run.served
        moved = planned(trace, once(5, move(alone.worker + 1, Role.PREFILL)), hand_over_part=0.0, continuable=1.0)
        (served,) = moved.run.served
        assert served.worker != alone.worker and served.first_token == alone.first_token
        assert mean_itl(served) > mean_itl(alone)

    def test_a_move_that_cannot_finish_is_undone_and_the_worker_decodes_on(self) -> None:
        trace = requests(60, per_second=1, output=LONG_ANSWER)
        run = planned(trace, once(10, move(3, Role.PREFILL)), continuable=0.0, move_timeout=1.0)
        assert (run.moves, run.undone) == ([], 1)
        assert {served.worker for served in run.run.served if served.arrived > 20} == {2, 3}

    def test_prompts_that_have_not_begun_are_given_back(self) -> None:
        trace = [TraceRequest(i * 0.001, 60_000, 2, ()) for i in range(12)]
        run = planned(trace, once(5, move(1, Role.DECODE)), decode=1)
        assert len(run.moves) == 1 and run.moves[0] < 5.0
        assert len(run.run.served) == len(trace)

    def test_a_move_that_takes_nothing_away_is_done_at_once(self) -> None:
        trace = requests(20, output=LONG_ANSWER)
        assert planned(trace, once(10, move(3, Role.BOTH))).moves == [0.0]

    @pytest.mark.parametrize("epoch", [0, 2])
    def test_a_wish_for_another_start_of_the_worker_is_not_obeyed(self, epoch: int) -> None:
        run = planned(requests(20), once(10, move(3, Role.PREFILL, epoch)))
        assert (run.moves, run.undone) == ([], 0)

    def test_without_moves_in_place_a_worker_starts_cold_in_its_new_role(self) -> None:
        run = planned(requests(90), once(10, move(3, Role.PREFILL)), in_place=False, cold_start=30.0, start_spread=0.0)
        before, after = (m for m in run.members if m.id == "w3")
        assert (before.epoch, after.epoch, after.role) == (1, 2, Role.PREFILL)
        assert after.asked_at == before.gone_at and after.since == pytest.approx(after.asked_at + 30.0)
        assert len(run.run.served) == run.arrivals


class TestStartsAndEnds:
    def test_a_start_is_paid_for_from_the_moment_it_is_asked_for_and_serves_later(self) -> None:
        add = AddAction(Role.DECODE, 1, "a test")
        run = planned(requests(100), once(20, add), cold_start=40.0, start_spread=0.0, obeys_after=1.0)
        new = run.members[-1]
        assert (new.asked_at, new.since) == (21.0, 61.0)
        assert run.gpu_seconds == pytest.approx(4 * run.horizon + run.horizon - 21.0)
        assert min(served.arrived for served in run.run.served if served.worker == new.index) > 61.0

    def test_a_start_that_fails_is_paid_for_until_it_is_given_up(self) -> None:
        seen: list[int] = []

        def decide(view: PoolView) -> tuple[Action | GiveUp, ...]:
            seen.append(sum(start.count for start in view.starts))
            made: dict[float, Action | GiveUp] = {10.0: AddAction(Role.DECODE, 2, ""), 50.0: GiveUp(Role.DECODE, 2, "")}
            return (made[view.at_s],) if view.at_s in made else ()

        run = planned(requests(80), decide, start_fails=1.0)
        assert run.given_up == 2 and run.gpu_seconds == pytest.approx(4 * run.horizon + 2 * (50.0 - 11.0))
        assert seen[0] == 0 and max(seen) == 2 and seen[-1] == 0

    def test_a_worker_that_is_removed_finishes_what_it_has(self) -> None:
        trace = requests(60, output=400)
        run = planned(trace, once(20, remove(3)))
        gone = run.members[2]
        assert gone.state is State.GONE and gone.gone_at is not None and 21.0 <= gone.gone_at < 32.0
        assert len(run.run.served) == len(trace) and run.lost == 0
        assert max(served.arrived for served in run.run.served if served.worker == 2) < 21.0
        assert run.gpu_seconds == pytest.approx(3 * run.horizon + gone.gone_at)

    def test_a_worker_that_dies_is_continued_by_others_and_comes_back_in_the_role_it_was_started_in(self) -> None:
        trace = requests(240, per_second=4, output=400)
        run = planned(trace, once(10, move(3, Role.PREFILL)), lost_per_hour=40.0, continuable=1.0, cold_start=20.0)
        assert run.died > 3 and run.lost == 0
        assert len(run.run.served) + run.turned_away == len(trace)
        first: dict[WorkerId, Role] = {}
        for member in run.members:
            assert first.setdefault(member.id, member.started_as) is member.started_as
        again = [m for m in run.members if m.epoch > 1]
        assert again and all(m.started_as is first[m.id] for m in again)

    def test_answers_that_cannot_be_continued_are_lost_with_their_worker_and_have_not_met_their_targets(self) -> None:
        trace = requests(240, per_second=4, output=400)
        run = planned(trace, lost_per_hour=40.0, continuable=0.0, cold_start=20.0)
        report = summarize_planned(run)
        assert run.lost > 0 and report.attained < 1.0
        assert report.ended + report.lost + report.turned_away == len(trace)

    def test_where_nobody_decodes_requests_are_turned_away(self) -> None:
        run = planned(requests(60), once(20, remove(3)), decode=1)
        assert run.turned_away > 0
        assert summarize_planned(run).attained == len(run.run.served) / run.arrivals < 1.0


class TestWhatThePlannerSees:
    def test_all_is_seen_late_and_every_arrival_once(self) -> None:
        views: list[PoolView] = []

        def decide(view: PoolView) -> tuple[Action, ...]:
            views.append(view)
            return ()

        trace = requests(100)
        planned(trace, decide, seen_after=2.0)
        assert {view.age_s for view in views} == {2.0}
        assert {worker.load_age_s for view in views for worker in view.workers} == {2.0}
        traffic = [view.traffic for view in views if view.traffic is not None]
        first, last = (views[i].at_s - 2.0 for i in (0, -1))
        assert sum(each.seconds for each in traffic) == pytest.approx(last - first)
        assert sum(each.arrivals for each in traffic) == sum(first < request.at <= last for request in trace)
        assert all(each.ttft is not None and 0 < each.ttft.p50_s <= each.ttft.p95_s for each in traffic)
        finished = sum(each.finished for each in traffic)
        assert 0 < finished <= len(trace) and traffic[-1].mean_output == 200
        assert views[-1].rates is not None

    def test_a_moving_and_a_leaving_worker_are_seen_as_such(self) -> None:
        views: list[PoolView] = []
        act = once(10, move(3, Role.PREFILL), remove(1))

        def decide(view: PoolView) -> tuple[Action | GiveUp, ...]:
            views.append(view)
            return act(view)

        trace = [TraceRequest(0.0, 600, 6000, ()), TraceRequest(40.0, 600, 1, ())]
        planned(trace, decide, decode=1, continuable=0.0)
        moving = [w for view in views for w in view.workers if w.moving_to is Role.PREFILL]
        assert moving and all(w.role is Role.DECODE and w.moving_for_s > 0 for w in moving)
        assert not any(w.id == "w1" for w in views[-1].workers)

    def test_what_waits_for_prefill_is_the_queue(self) -> None:
        views: list[PoolView] = []

        def decide(view: PoolView) -> tuple[Action, ...]:
            views.append(view)
            return ()

        trace = [TraceRequest(3.5 + i * 0.001, 60_000, 2, ()) for i in range(12)]
        planned(trace, decide, prefill=1)
        queue = views[0].queue
        assert queue is not None and queue.requests > 0
        assert queue.tokens == 60_000 * queue.requests and 0 < queue.oldest_s <= 1.5


def test_a_run_is_repeatable() -> None:
    def run() -> PlannedRun:
        decide = once(10, move(3, Role.PREFILL), AddAction(Role.DECODE, 2, ""))
        return planned(requests(100), decide, lost_per_hour=20.0, start_fails=0.3, cold_start=20.0)

    one, other = run(), run()
    assert one.run.served == other.run.served and one.gpu_seconds == other.gpu_seconds


def test_an_answer_of_one_token_has_no_time_between_tokens() -> None:
    (served,) = planned(requests(1, per_second=1, output=1)).run.served
    assert mean_itl(served) == 0.0


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("mode", Mode)
def test_the_planner_itself_runs_in_virtual_time_and_serves_every_request(rule: Rule, mode: Mode) -> None:
    readers = [TraceRequest(i * 0.25, 20_000, 50, ()) for i in range(240)]
    writers = [TraceRequest(60 + i * 0.25, 500, 600, ()) for i in range(240)]
    trace = sorted((*readers, *writers), key=lambda request: request.at)
    config = PlannedConfig(
        ClusterConfig(workers=0, prefill=2, decode=6),
        PlannerConfig(mode=mode, rule=rule, ttft_s=2.0, itl_s=0.03, max_workers=8),
        2.0,
        0.03,
        Life(cold_start=20.0, in_place=rule is Rule.SLA),
    )
    run = PlannedCluster(config).simulate_planned(trace)
    assert len(run.run.served) == len(trace) and run.turned_away == run.lost == 0
    assert run.plans and all(plan.verdict for plan in run.plans)
    head, row = planned_table([summarize_planned(run)])
    assert dict(zip(head, row, strict=True))["planner"] == f"{rule} {mode}"


@pytest.mark.parametrize(
    "wrong", [{"cold_start": -1.0}, {"start_fails": 1.5}, {"move_timeout": float("nan")}, {"continuable": 2.0}]
)
def test_lives_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=next(iter(wrong))):
        dataclasses.replace(Life(), **wrong)

"""What a worker decides about prefill jobs, and whether its engine gets on."""

from __future__ import annotations

import dataclasses
import json

import pytest

from tests.conformance.registry import worker
from vllm_pd.agent import prefill_rules as rules
from vllm_pd.agent.prefill_progress import EngineProgress
from vllm_pd.agent.prefill_rules import How
from vllm_pd.state.base import WorkerId
from vllm_pd.state.prefill_payload import PrefillRequest, decode_answer
from vllm_pd.state.prefill_queue import QueueDepth

OWN, A, B = WorkerId("own:1"), WorkerId("a:1"), WorkerId("b:1")
NOW_MS = 1_800_000_000_000


def request(**changes: object) -> PrefillRequest:
    fields = {"path": "/v1/completions", "headers": [], "body": b"{}", "deadline_ms": NOW_MS, "timeout_ms": 30_000}
    return PrefillRequest(**(fields | changes))  # type: ignore[arg-type]


def test_the_budget_is_two_batches_of_each_engine_unless_it_is_said() -> None:
    assert rules.budget_tokens(0, 8192, 4) == 65_536
    assert rules.budget_tokens(1000, 8192, 4) == 1000


def test_an_empty_worker_takes_any_size_and_a_full_one_nothing() -> None:
    assert [rules.fits(100, claimed) for claimed in (0, 1, 99, 100, 250)] == [-1, 99, 1, None, None]


def test_a_worker_steals_when_it_has_no_more_than_a_batch_left() -> None:
    assert [rules.is_idle(100, claimed) for claimed in (0, 50, 51, 100)] == [True, True, False, False]


@pytest.mark.parametrize(
    ("depths", "before", "victim"),
    [
        ({}, {}, None),
        ({A: QueueDepth(claimed=5, claimed_tokens=500)}, {}, None),
        # It will claim its job itself in a moment.
        ({A: QueueDepth(1, 100)}, {}, None),
        # It does not: perhaps it is stopped.
        ({A: QueueDepth(1, 100)}, {A: QueueDepth(2, 200)}, A),
        ({A: QueueDepth(1, 100, 1, 50)}, {}, A),
        ({A: QueueDepth(9, 100, 1, 50), B: QueueDepth(1, 101, 1, 50)}, {}, B),
        ({OWN: QueueDepth(9, 900, 1, 50)}, {OWN: QueueDepth(9, 900, 1, 50)}, None),
    ],
)
def test_jobs_are_taken_from_the_most_loaded_worker_that_does_not_come_to_them(
    depths: dict[WorkerId, QueueDepth], before: dict[WorkerId, QueueDepth], victim: WorkerId | None
) -> None:
    assert rules.steal_from(depths, before, OWN) == victim


def test_a_deadline_allows_for_clocks_that_differ_and_the_time_of_the_work_does_not() -> None:
    assert rules.time_left_s(request(deadline_ms=NOW_MS + 2000), NOW_MS) == 7.0
    assert rules.time_left_s(request(deadline_ms=NOW_MS + 60_000), NOW_MS) == 30.0
    assert rules.time_left_s(request(deadline_ms=NOW_MS - rules.CLOCK_MARGIN_MS), NOW_MS) == 0.0


def test_the_own_server_gets_its_own_key_and_nobody_elses() -> None:
    asked = request(
        headers=[
            ("X-Request-Id", "r"), ("authorization", "Bearer client"), ("Cookie", "c"), ("Content-Length", "7"),
            ("Host", "router"), ("X-data-parallel-rank", "3"), ("content-type", "application/json; charset=utf-8"),
        ]
    )  # fmt: skip
    kept = [("X-Request-Id", "r"), ("content-type", "application/json; charset=utf-8")]
    assert rules.own_headers(asked, "key", own_stream=False) == [*kept, ("Authorization", "Bearer key")]
    # The engine was chosen for the worker in whose stream the job was.
    ranked = [kept[0], ("X-data-parallel-rank", "3"), kept[1]]
    assert rules.own_headers(asked, "", own_stream=True) == ranked
    assert rules.own_headers(request(), "", own_stream=True) == [("Content-Type", "application/json")]


@pytest.mark.parametrize("status", [200, 400, 413, 422])
def test_an_answer_and_a_clients_mistake_are_results(status: int) -> None:
    verdict = rules.verdict_of(status, b'{"choices":[{"finish_reason":"length"}]}', None, 12)
    assert (verdict.how, verdict.own_fault) == (How.DONE, False)
    answer = decode_answer(verdict.data)
    assert (answer.status, answer.computed_ms) == (status, 12)


@pytest.mark.parametrize("status", [401, 403, 408, 500, 502, 504])
def test_a_failure_of_the_worker_is_a_failed_attempt_that_says_what_was_answered(status: int) -> None:
    verdict = rules.verdict_of(status, b"the engine is dead", None, 0)
    assert (verdict.how, verdict.own_fault) == (How.FAILED, True)
    assert verdict.error == f"the server of the worker answered {status}: the engine is dead"


def test_a_model_that_only_others_have_is_for_others() -> None:
    verdict = rules.verdict_of(404, b"no such adapter", None, 0)
    assert (verdict.how, verdict.own_fault) == (How.FAILED, False)


@pytest.mark.parametrize(
    ("status", "retry_after", "pause_s"),
    [
        (429, "2", 2.0),
        (503, None, 1.0),
        (503, "3600", 5.0),
        (503, "Wed, 21 Oct 2026 07:28:00 GMT", 1.0),
        (503, "-1", 1.0),
    ],
)
def test_back_pressure_gives_the_job_back_and_pauses(status: int, retry_after: str | None, pause_s: float) -> None:
    verdict = rules.verdict_of(status, b"", retry_after, 0)
    assert (verdict.how, verdict.pause_s, verdict.own_fault) == (How.RETURNED, pause_s, False)


def test_what_the_engine_gave_up_is_given_back() -> None:
    assert rules.verdict_of(200, b'{"choices":[{"finish_reason":"abort"}]}', None, 0).how is How.RETURNED


@pytest.mark.parametrize("body", [b"", b"[]", b"\xff", b'{"choices":null}', b"[" * 100_000])
def test_an_answer_that_is_no_engines_is_for_whoever_asked(body: bytes) -> None:
    assert rules.verdict_of(200, body, None, 0).how is How.DONE


def test_a_worker_that_fails_again_and_again_takes_less_and_less() -> None:
    assert [rules.pause_after(n) for n in (0, 1, 2, 3, 4, 100)] == [0.0, 0.0, 0.25, 0.5, 1.0, 5.0]


@pytest.mark.parametrize(
    "body", [b"{}", b"", b"\xff", b'{"kv_transfer_params":{"pd_hold":7}}', b'{"kv_transfer_params":7}']
)
def test_work_without_a_key_leaves_its_blocks_to_their_lease(body: bytes) -> None:
    assert rules.release_of(worker(), request(body=body), []) is None


def test_blocks_are_let_go_by_their_key_on_every_engine_that_may_have_them() -> None:
    asked = request(body=b'{"prompt":"p","kv_transfer_params":{"pd_hold":"k","do_remote_decode":true}}')
    key = ("Authorization", "Bearer own")
    one, two = dataclasses.replace(worker(), dp_size=1), dataclasses.replace(worker(), dp_size=2)
    release = rules.release_of(one, asked, [key, ("X-Request-Id", "r")])
    assert release is not None
    assert json.loads(release.body)["kv_transfer_params"] == {"pd_release": ["k"]}
    assert release.headers == [[key]]
    release = rules.release_of(two, asked, [key])
    assert release is not None
    assert release.headers == [[key, ("x-data-parallel-rank", "0")], [key, ("x-data-parallel-rank", "1")]]
    chosen = ("X-data-parallel-rank", "1")
    release = rules.release_of(two, asked, [key, chosen])
    assert release is not None and release.headers == [[key, chosen]]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def steps(progress: EngineProgress, clock: Clock, *pauses: float) -> None:
    for pause in pauses:
        clock.now += pause
        progress.note(1)


def test_silence_while_there_is_work_means_that_the_engine_is_stuck() -> None:
    clock = Clock()
    progress = EngineProgress(clock=clock)
    steps(progress, clock, 0.0, 0.1, 0.1)
    progress.note(0)
    clock.now += 500
    # An idle engine says nothing, and a job that has just come needs its time.
    assert not progress.stuck(since=clock.now, at_least_s=10)
    given = clock.now
    clock.now += 10.1
    assert progress.stuck(given, 10)
    progress.note(1)
    assert not progress.stuck(given, 10)


def test_an_engine_that_has_just_started_has_all_the_patience_there_is() -> None:
    """Its first steps may take far longer than any later one, and nothing is known of it."""
    clock = Clock()
    progress = EngineProgress(clock=clock)
    given = clock.now
    clock.now += 59
    assert not progress.stuck(given, 10)
    clock.now += 2
    assert progress.stuck(given, 10)


def test_an_engine_that_does_one_thing_at_a_time_is_known_by_that() -> None:
    """It reports when it is idle again, so no two reports enclose a step."""
    clock = Clock()
    progress = EngineProgress(clock=clock)
    for _ in range(2):
        clock.now += 100
        progress.give()
        clock.now += 8
        progress.note(0)
    given = clock.now
    progress.give()
    clock.now += 15
    assert not progress.stuck(given, 10)
    clock.now += 2
    assert progress.stuck(given, 10)


def test_what_is_known_of_an_engine_outlasts_a_rest() -> None:
    clock = Clock()
    progress = EngineProgress(clock=clock)
    steps(progress, clock, 0.0, 20.0, 20.0)
    for _ in range(3):
        progress.note(0)
        clock.now += 1000
    progress.note(0)
    given = clock.now
    clock.now += 39
    assert not progress.stuck(given, 10)


def test_an_engine_whose_steps_take_long_is_not_stuck() -> None:
    clock = Clock()
    progress = EngineProgress(clock=clock)
    given = clock.now
    steps(progress, clock, 0.0, 20.0, 20.0)
    clock.now += 39
    assert not progress.stuck(given, 10)
    clock.now += 2
    assert progress.stuck(given, 10)


def test_one_stop_does_not_make_an_engine_slow() -> None:
    clock = Clock()
    progress = EngineProgress(clock=clock)
    given = clock.now
    steps(progress, clock, 0.0, *[0.1] * 20, 25.0, *[0.1] * 20)
    clock.now += 10.1
    assert progress.stuck(given, 10)


def test_patience_is_bounded_and_forgets() -> None:
    clock = Clock()
    progress = EngineProgress(clock=clock)
    steps(progress, clock, 0.0, 200.0, 200.0)
    given = clock.now
    clock.now += 61
    assert progress.stuck(given, 10)
    for _ in range(3):
        steps(progress, clock, 301.0, 0.1)
        progress.note(0)
    given = clock.now
    clock.now += 10.1
    assert progress.stuck(given, 10)


def test_pauses_of_an_idle_engine_teach_nothing() -> None:
    clock = Clock()
    progress = EngineProgress(clock=clock)
    steps(progress, clock, 0.0, 0.1, 0.1)
    for _ in range(5):
        progress.note(0)
        clock.now += 30
    given = clock.now
    clock.now += 10.1
    assert progress.stuck(given, 10)


def test_where_reports_go_elsewhere_silence_means_nothing() -> None:
    clock = Clock()
    progress = EngineProgress(known=False, clock=clock)
    clock.now += 1000
    assert not progress.stuck(0.0, 10)

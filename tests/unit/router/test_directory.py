from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from vllm_pd.router.breaker import FAILURES_TO_OPEN
from vllm_pd.router.directory import LAST_RESORT_S, Directory
from vllm_pd.router.worker import Source, Worker
from vllm_pd.routing.model import NO_OVERLAP, Ask
from vllm_pd.state import Epoch, Holder, PoolSpec, Role, WorkerId, WorkerLoad, WorkerRecord, WorkerState
from vllm_pd.state.base import MoveState, RoleMove, RouterWork

SPEC = PoolSpec("m", "", "bf16", "auto", "nhd", 32, "sha256_cbor", "0.32.0")
OTHER = replace(SPEC, model="other")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def state(
    name: str, role: Role = Role.BOTH, *, epoch: int = 1, lease_ms: int = 10_000, spec: PoolSpec = SPEC, **load: int
) -> WorkerState:
    entry = WorkerRecord(WorkerId(name), Epoch(epoch), spec, f"http://{name}", role, (spec.model,), nixl_host="h")
    return WorkerState(entry, lease_ms, {0: WorkerLoad(load["running"], 0, 0.0, load["at"])} if load else {})


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def directory(clock: Clock) -> Directory:
    return Directory(clock, store_configured=True)


def names(directory: Directory) -> list[str]:
    return [worker.id for worker in directory.workers]


def only_named(directory: Directory, name: str) -> Worker:
    (worker,) = [worker for worker in directory.workers if worker.id == name]
    return worker


def only(directory: Directory) -> Worker:
    (worker,) = directory.workers
    return worker


def test_worker_missing_from_a_snapshot_is_gone_at_once(directory: Directory) -> None:
    directory.replace(Source.STORE, [state("a"), state("b")])
    directory.replace(Source.STORE, [state("b")])
    assert names(directory) == ["b"]


def test_store_that_restarted_empty_does_not_empty_the_directory(directory: Directory, clock: Clock) -> None:
    directory.replace(Source.STORE, [state("a", lease_ms=8000), state("b", lease_ms=8000)])
    directory.replace(Source.STORE, [])
    clock.now += 3
    directory.replace(Source.STORE, [state("b")])
    assert names(directory) == ["a", "b"]
    clock.now += 5
    directory.replace(Source.STORE, [state("b")])
    assert names(directory) == ["b"]


def test_after_an_outage_a_missing_worker_has_its_lease_to_come_back(directory: Directory, clock: Clock) -> None:
    directory.replace(Source.STORE, [state("a", lease_ms=8000), state("b")])
    clock.now += 300
    directory.replace(Source.STORE, [state("b")], after_outage=True)
    clock.now += 7
    directory.replace(Source.STORE, [state("b")])
    assert names(directory) == ["a", "b"]
    clock.now += 2
    directory.replace(Source.STORE, [state("b")])
    assert names(directory) == ["b"]


def test_one_source_does_not_remove_workers_of_the_other(directory: Directory) -> None:
    directory.replace(Source.STORE, [state("a"), state("c")])
    directory.replace(Source.STATIC, [state("b")])
    directory.replace(Source.STORE, [state("c")])
    assert names(directory) == ["b", "c"]


def test_worker_known_from_both_sources_is_described_by_the_store(directory: Directory) -> None:
    directory.replace(Source.STATIC, [state("a", Role.DECODE)])
    directory.replace(Source.STORE, [state("a", Role.PREFILL)])
    directory.replace(Source.STATIC, [state("a", Role.DECODE)])
    assert only(directory).role is Role.PREFILL


def test_role_change_of_a_running_worker_is_taken_over(directory: Directory) -> None:
    directory.replace(Source.STORE, [state("a", Role.PREFILL)])
    directory.replace(Source.STORE, [state("a", Role.DECODE)])
    assert only(directory).role is Role.DECODE


ASK = Ask(100, 16)


def test_only_a_new_report_moves_the_base_of_the_own_count(directory: Directory, clock: Clock) -> None:
    directory.replace(Source.STORE, [state("a", running=4, at=1)])
    (engine,) = only(directory).engines
    engine.begin("r", ASK, NO_OVERLAP, clock.now)
    directory.replace(Source.STORE, [state("a", running=4, at=1)])
    assert engine.running == 5
    directory.replace(Source.STORE, [state("a", running=4, at=2)])
    assert engine.running == 4
    assert only(directory).inflight == 1


def test_work_of_other_routers_counts_and_the_own_does_not(clock: Clock) -> None:
    directory = Directory(clock, store_configured=True, router="me")
    works = {"me": RouterWork(7000, 7), "one": RouterWork(1000, 1), "two": RouterWork(500, 2)}
    directory.replace(Source.STORE, [replace(state("a"), others=works)])
    (engine,) = only(directory).engines
    assert engine.prefill_tokens == 1500
    directory.replace(Source.STORE, [replace(state("a"), others={"one": RouterWork(200, 1)})])
    assert engine.prefill_tokens == 200
    directory.replace(Source.STORE, [state("a")])
    assert engine.prefill_tokens == 0


def test_each_rank_of_a_worker_is_an_engine_with_a_load_of_its_own(directory: Directory) -> None:
    plain = state("a")
    entry = replace(plain.record, dp_size=2, kv_blocks=1000)
    loads = {0: WorkerLoad(1, 0, 0.1, 1), 1: WorkerLoad(7, 2, 0.9, 1)}
    directory.replace(Source.STORE, [WorkerState(entry, 10_000, loads)])
    engines = only(directory).engines
    assert [(e.holder, e.running, e.waiting, e.kv_usage, e.kv_blocks) for e in engines] == [
        (Holder(WorkerId("a"), 0), 1, 0, 0.1, 500),
        (Holder(WorkerId("a"), 1), 7, 2, 0.9, 500),
    ]


def test_restarted_worker_begins_without_the_old_ones_requests(directory: Directory, clock: Clock) -> None:
    directory.replace(Source.STORE, [state("a", epoch=1)])
    (old,) = only(directory).engines
    old.begin("r", ASK, NO_OVERLAP, clock.now)
    directory.replace(Source.STORE, [state("a", epoch=2)])
    assert only(directory).inflight == 0
    old.finish("r", clock.now)
    assert only(directory).inflight == 0


def test_new_worker_of_a_pool_is_taken_to_be_as_fast_as_the_others(directory: Directory, clock: Clock) -> None:
    directory.replace(Source.STORE, [state("a"), state("c", spec=OTHER)])
    for n in range(100):
        (engine,) = only_named(directory, "a").engines
        engine.begin(n, ASK, NO_OVERLAP, clock.now)
        clock.now += 3.0
        engine.first_token(n, clock.now)
        engine.finish(n, clock.now)
    directory.replace(Source.STORE, [state("a"), state("b"), state("c", spec=OTHER)])
    assert only_named(directory, "b").engines[0].rates.prefill(100, 0) == pytest.approx(3.0, rel=0.2)
    assert only_named(directory, "c").engines[0].rates.prefill(100, 0) < 0.1


def test_role_of_the_engines_follows_the_workers(directory: Directory) -> None:
    directory.replace(Source.STORE, [state("a", Role.PREFILL)])
    (engine,) = only(directory).engines
    directory.replace(Source.STORE, [state("a", Role.DECODE)])
    assert only(directory).engines == (engine,)
    assert engine.role is Role.DECODE


def test_generation_changes_with_who_is_there(directory: Directory) -> None:
    seen = [directory.generation]
    for states in ([state("a")], [state("a", running=1, at=1)], [state("a", epoch=2)], [state("b")]):
        directory.replace(Source.STORE, states)
        seen.append(directory.generation)
    assert [after > before for before, after in itertools.pairwise(seen)] == [True, False, True, True]


def test_refusing_worker_is_left_out_until_it_gives_a_sign_of_life(directory: Directory, clock: Clock) -> None:
    directory.replace(Source.STORE, [state("a"), state("b")])
    worker, other = directory.workers
    directory.note_failure(worker, "refused")
    clock.now += 3600
    assert directory.serving("m") == [other]
    directory.note_alive(worker)
    assert directory.serving("m") == [worker, other]


def test_busy_worker_is_left_out_for_as_long_as_it_asks(directory: Directory, clock: Clock) -> None:
    directory.replace(Source.STORE, [state("a"), state("b")])
    worker, other = directory.workers
    directory.note_answer(worker, 503, [("Retry-After", "5")])
    assert directory.serving("m") == [other]
    assert not worker.is_broken
    assert directory.missing() == ""
    clock.now += 5
    assert directory.serving("m") == [worker, other]


def test_when_all_are_in_trouble_the_busy_ones_come_first(directory: Directory) -> None:
    directory.replace(Source.STORE, [state("a"), state("b")])
    dead, busy = directory.workers
    directory.note_failure(dead, "refused")
    directory.note_answer(busy, 429, [])
    assert directory.serving("m") == [busy]


def test_errors_of_clients_say_nothing_about_a_worker(directory: Directory) -> None:
    directory.replace(Source.STORE, [state("a"), state("b")])
    for _ in range(100):
        directory.note_answer(directory.workers[0], 400, [])
    assert len(directory.serving("m") or []) == 2


def test_restarted_worker_is_used_at_once(directory: Directory) -> None:
    directory.replace(Source.STORE, [state("a", epoch=1), state("b")])
    directory.note_failure(directory.workers[0], "refused")
    directory.replace(Source.STORE, [state("a", epoch=2), state("b")])
    assert len(directory.serving("m") or []) == 2


def test_refusing_decode_worker_is_still_tried_when_it_is_the_only_one(directory: Directory) -> None:
    directory.replace(Source.STORE, [state("d", Role.DECODE), state("p", Role.PREFILL)])
    directory.note_failure(directory.workers[0], "refused")
    assert {w.id for w in directory.serving("m") or []} == {"d", "p"}
    assert "d takes no connections: refused" in directory.missing()


def test_router_is_ready_again_when_its_only_worker_may_be_tried(directory: Directory) -> None:
    directory.replace(Source.STORE, [state("d", Role.DECODE)])
    directory.store_up()
    worker = only(directory)
    for _ in range(FAILURES_TO_OPEN):
        directory.note_failed(worker, "status 500")
    assert "d fails: status 500" in directory.missing()
    # Else nobody would send the request that shows it to be well.
    directory.note_alive(worker)
    assert directory.missing() == ""


def test_with_one_pool_any_model_goes_to_it(directory: Directory) -> None:
    directory.replace(Source.STORE, [state("a")])
    assert [w.id for w in directory.serving("an-adapter-loaded-later") or []] == ["a"]
    assert [w.id for w in directory.serving(None) or []] == ["a"]


def test_adapter_goes_to_the_workers_that_name_it(directory: Directory) -> None:
    plain = state("b")
    tuned = replace(plain, record=replace(plain.record, models=("m", "tuned"), loras=("tuned",)))
    directory.replace(Source.STORE, [state("a"), tuned])
    assert [w.id for w in directory.serving("tuned") or []] == ["b"]
    assert [w.id for w in directory.serving("m") or []] == ["a", "b"]


def test_with_several_pools_only_workers_of_the_model_get_it(directory: Directory) -> None:
    directory.replace(Source.STORE, [state("a"), state("b", spec=OTHER)])
    assert [w.id for w in directory.serving("other") or []] == ["b"]
    assert directory.serving("unknown") is None
    assert directory.serving(None) is None
    assert directory.models == ["m", "other"]


def test_who_serves_a_model_is_found_out_once_until_something_changes(directory: Directory) -> None:
    directory.replace(Source.STORE, [state("a"), state("b")])
    found = directory.serving("m")
    assert directory.serving("m") is found
    directory.note_answer(only_named(directory, "a"), 200, [])
    assert directory.serving("m") is found
    directory.replace(Source.STORE, [state("a"), state("b"), state("c")])
    assert len(directory.serving("m") or []) == 3
    directory.note_answer(only_named(directory, "a"), 500, [])
    assert directory.serving("m") is not directory.serving("m"), "what depends on the time is looked at each time"
    assert directory.serving("no model") is not directory.serving("no model"), "names of clients are not kept"


def test_what_is_missing_is_named(directory: Directory) -> None:
    assert "store does not answer" in directory.missing()
    directory.store_up()
    assert "No worker is alive" in directory.missing()
    directory.replace(Source.STORE, [state("p", Role.PREFILL)])
    assert "No worker that decodes" in directory.missing()
    directory.replace(Source.STORE, [state("p", Role.PREFILL), state("d", Role.DECODE)])
    assert directory.missing() == ""


def test_lease_runs_down_between_refreshes(directory: Directory, clock: Clock) -> None:
    directory.replace(Source.STORE, [state("a", lease_ms=5000)])
    clock.now += 2
    assert only(directory).lease_left_ms(clock.now) == 3000
    clock.now += 9
    assert only(directory).lease_left_ms(clock.now) == 0


def test_the_last_decode_worker_is_tried_after_its_lease_until_it_refuses(directory: Directory, clock: Clock) -> None:
    directory.store_up()
    directory.replace(Source.STORE, [state("d", Role.DECODE), state("p", Role.PREFILL)])
    directory.replace(Source.STORE, [state("p", Role.PREFILL)])
    assert names(directory) == ["p"]
    assert "No worker that decodes is alive" in directory.missing()
    tried = directory.serving("m") or []
    assert {w.id for w in tried} == {"d", "p"}
    directory.note_failure(next(w for w in tried if w.id == "d"), "refused")
    assert [w.id for w in directory.serving("m") or []] == ["p"]


def test_a_store_that_dies_while_a_lease_is_late_leaves_the_worker_in_use(directory: Directory, clock: Clock) -> None:
    directory.store_up()
    directory.replace(Source.STORE, [state("d", Role.DECODE), state("p", Role.PREFILL)])
    directory.replace(Source.STORE, [state("p", Role.PREFILL)])
    directory.store_down("killed")
    clock.now += 3600
    assert directory.missing() == ""
    assert {w.id for w in directory.serving("m") or []} == {"d", "p"}
    directory.replace(Source.STORE, [], after_outage=directory.store_up())
    assert {w.id for w in directory.serving("m") or []} == {"d", "p"}, "it has not had the time to come back"


def test_a_worker_that_is_late_comes_back_with_its_requests_counted(directory: Directory, clock: Clock) -> None:
    directory.replace(Source.STORE, [state("d"), state("p", Role.PREFILL)])
    worker = directory.workers[0]
    worker.engines[0].begin("r", ASK, NO_OVERLAP, clock.now)
    directory.replace(Source.STORE, [state("p", Role.PREFILL)])
    directory.replace(Source.STORE, [state("d"), state("p", Role.PREFILL)])
    assert directory.workers[0] is worker
    assert worker.inflight == 1


def test_a_worker_that_left_is_not_tried_while_another_decodes_nor_after_a_minute(
    directory: Directory, clock: Clock
) -> None:
    directory.replace(Source.STORE, [state("a"), state("b")])
    directory.replace(Source.STORE, [state("b")])
    assert [w.id for w in directory.serving("m") or []] == ["b"]
    clock.now += LAST_RESORT_S
    directory.replace(Source.STORE, [state("p", Role.PREFILL)])
    assert {w.id for w in directory.serving("m") or []} == {"b", "p"}
    clock.now += LAST_RESORT_S
    directory.replace(Source.STORE, [state("p", Role.PREFILL)])
    assert [w.id for w in directory.serving("m") or []] == ["p"]


def test_a_worker_that_left_is_tried_for_its_own_model_only(directory: Directory) -> None:
    directory.replace(Source.STORE, [state("a"), state("b", spec=OTHER)])
    directory.replace(Source.STORE, [state("b", spec=OTHER)])
    assert [w.id for w in directory.serving("m") or []] == ["b"], "one pool is left, so everything goes to it"
    directory.replace(Source.STORE, [state("p", Role.PREFILL, spec=OTHER)])
    assert [w.id for w in directory.serving("m") or []] == ["a"]
    assert {w.id for w in directory.serving("other") or []} == {"b", "p"}


def leaving(state: WorkerState, to: Role, *, hand_over: bool = False) -> WorkerState:
    move = RoleMove("w", to, "operator", MoveState.DRAINING, 0, hand_over=hand_over)
    return replace(state, record=replace(state.record, move=move))


@pytest.mark.parametrize(
    ("role", "to", "decodes", "hands_over"),
    [
        (Role.DECODE, Role.PREFILL, False, False),
        (Role.PREFILL, Role.DECODE, False, False),
        (Role.BOTH, Role.PREFILL, False, False),
        (Role.BOTH, Role.DECODE, True, False),
    ],
)
def test_one_on_its_way_to_another_role_does_nothing_of_what_it_leaves(
    directory: Directory, role: Role, to: Role, decodes: bool, hands_over: bool
) -> None:
    directory.replace(Source.STORE, [leaving(state("a", role), to, hand_over=True)])
    worker = only(directory)
    assert (worker.decodes, worker.hands_over) == (decodes, hands_over)
    assert worker.hands_off is (role.decodes and not to.decodes)
    assert directory.count_moving()[to] == 1 and directory.count_by_role()[role] == 1
    assert not directory.missing() or not role.decodes
    engines = worker.engines
    directory.replace(Source.STORE, [state("a", to)])
    assert (worker.role, worker.decodes, worker.hands_off) == (to, to.decodes, False)
    assert worker.engines is engines, "what is known of it stays"


def test_one_that_is_too_busy_goes_before_one_that_leaves_and_that_before_one_in_trouble(directory: Directory) -> None:
    directory.replace(Source.STORE, [leaving(state("a", Role.DECODE), Role.PREFILL), state("b", Role.DECODE)])
    a, b = only_named(directory, "a"), only_named(directory, "b")
    assert directory.serving("m") == [a, b]
    directory.note_answer(b, 429, [])
    assert directory.serving("m") == [a, b]
    directory.note_failure(b, "refused")
    assert directory.serving("m") == [a]

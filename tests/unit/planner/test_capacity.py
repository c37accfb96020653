"""How many requests meet their targets with so many workers, and how what was measured corrects that."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vllm_pd.planner.capacity import Demand, Side, Speed, StepLaw, decode_side, prefill_side
from vllm_pd.planner.config import PlannerConfig
from vllm_pd.planner.correct import corrected, reserved
from vllm_pd.planner.memory import Memory
from vllm_pd.planner.model import Latency, Traffic
from vllm_pd.planner.target import Outlook, Split, best_split, make_up, outlook
from vllm_pd.routing.model import Rates
from vllm_pd.state.base import Role

CONFIG = PlannerConfig(ttft_s=2.0, itl_s=0.05)
RATES = Rates(prefill_base=0.02, prefill_token=1e-4, prefill_square=0.0, step_base=0.02, step_sequence=2e-4)
SPEED = Speed(RATES, StepLaw(0.02, 2e-4, 4e-4), kv_tokens=100_000, held_tokens=3000.0)
DEMAND = Demand(5.0, 15_000.0, 15_000.0, 1500.0)
NOW = Split(4, 8)


def test_more_workers_are_never_worse_and_more_work_is_never_better() -> None:
    for side in (prefill_side, decode_side):
        ok = side(DEMAND, SPEED, CONFIG, 16).ok
        more = side(replace(DEMAND, uncached_tokens=20_000.0, output_tokens=2500.0), SPEED, CONFIG, 16).ok
        assert list(ok) == sorted(ok) and ok[0] == 0.0 and ok[-1] > 0.9
        assert all(b <= a + 1e-9 for a, b in zip(ok, more, strict=True))


def test_a_request_larger_than_the_usual_stream_needs_room_besides_those_that_are_there() -> None:
    """Long prompts with short answers are few among the streams, and most of the requests."""
    usual = decode_side(DEMAND, SPEED, CONFIG, 16)
    larger = decode_side(replace(DEMAND, prompt_tokens=60_000.0), SPEED, CONFIG, 16)
    assert larger.per_worker < usual.per_worker
    assert enough(larger) > enough(usual)


def test_what_one_kind_has_too_many_of_is_made_up_for_by_more_of_the_other_and_no_more_than_may_be() -> None:
    soon = outlook_now()
    wanted = best_split(soon, 8)
    there = wanted.moved(2)
    count = make_up(soon, there, Role.DECODE, soon.worth(wanted), 5)
    assert 0 < count <= 2 and soon.worth(Split(there.prefill, there.decode + count)) >= soon.worth(wanted)
    assert make_up(soon, wanted, Role.DECODE, soon.worth(wanted), 5) == 0
    assert make_up(soon, Split(0, 4), Role.DECODE, 0.9, 3) == 3, "none that prefills: no number is enough"


def enough(side: Side) -> int:
    """The least number of workers with which nearly all requests meet the target."""
    return next(workers for workers, ok in enumerate(side.ok) if ok > 0.9)


def outlook_now(speed: Speed = SPEED) -> Outlook:
    return outlook(DEMAND, (0.1, 0.1), speed, CONFIG, 8)


def measured(ttft: float | None, itl: float | None, count: int = 50) -> Traffic:
    def latency(within: float | None) -> Latency | None:
        return None if within is None else Latency(count, 0.1, 0.1, 0.2, within)

    return Traffic(10.0, count, count, 0, 0, 0, ttft=latency(ttft), answer_itl=latency(itl))


def after(steps: int, traffic: Traffic, memory: Memory | None = None) -> Memory:
    memory = memory or Memory()
    for _ in range(steps):
        speed = replace(SPEED, prefill_factor=memory.prefill_factor, decode_factor=memory.decode_factor)
        memory = corrected(memory, traffic, outlook_now(speed), NOW)
    return memory


def test_targets_missed_more_often_than_expected_make_work_count_for_more_within_bounds() -> None:
    memory = after(20, measured(0.3, 0.3))
    assert 1.1 < memory.prefill_factor < 1.4 and 1.1 < memory.decode_factor < 1.4
    memory = after(2000, measured(0.0, 0.0))
    assert memory.decode_factor <= 1.5


def test_targets_met_more_often_than_expected_make_work_count_for_less_until_that_is_what_is_expected() -> None:
    expected = outlook_now().prefill.ok[2]
    assert 0.5 < expected < 0.97
    memory = Memory()
    for _ in range(300):
        speed = replace(SPEED, prefill_factor=memory.prefill_factor)
        now = outlook_now(speed)
        memory = corrected(memory, measured(0.97, None), replace(now, decode=outlook_now().decode), Split(2, 8))
    assert memory.prefill_factor < 0.95
    speed = replace(SPEED, prefill_factor=memory.prefill_factor)
    assert prefill_side(DEMAND, speed, CONFIG, 8).ok[2] == pytest.approx(0.97, abs=0.03)


def kept(steps: int, traffic: Traffic, memory: Memory, *, is_enough: bool = True) -> Memory:
    """The memory after so many looks, ten seconds apart, at answers that last for half a minute."""
    for _ in range(steps):
        memory = replace(memory, clock=memory.clock + 10.0)
        memory = reserved(memory, traffic, CONFIG, is_enough=is_enough, answer_s=30.0)
    return memory


def test_a_reserve_is_built_up_while_more_miss_a_target_than_may_and_is_given_up_when_no_more_do() -> None:
    slightly = kept(30, measured(0.97, 0.96), Memory())
    assert 1.1 < slightly.reserve < 1.4
    assert kept(500, measured(0.5, 0.9), Memory()).reserve == 1.4
    assert 0.95 < kept(50, measured(0.99, 0.99), slightly).reserve < 1.0


def test_where_starts_are_slow_no_less_than_is_expected_is_planned_for() -> None:
    fine = measured(0.99, 0.99)
    assert kept(50, fine, Memory(start_s=CONFIG.payback_s)).reserve < 1.0
    assert kept(50, fine, Memory(start_s=CONFIG.payback_s + 1)).reserve == 1.0


def test_workers_that_were_known_to_be_too_few_and_answers_that_began_with_them_call_for_no_reserve() -> None:
    assert kept(50, measured(0.5, 0.5), Memory(), is_enough=False).reserve == 1.0
    assert kept(3, measured(0.5, 0.9), Memory()).reserve == 1.0
    assert kept(5, measured(0.5, 0.9), Memory()).reserve > 1.0


def test_few_requests_move_the_reserve_little_and_none_not_at_all() -> None:
    few, many = (kept(10, measured(0.9, 0.9, count), Memory()).reserve for count in (2, 50))
    assert 1.0 < few < 1.0 + (many - 1.0) / 5
    for unknown in (measured(None, None), measured(0.9, None), measured(None, 0.9)):
        assert kept(20, unknown, Memory(reserve=1.2)).reserve == 1.2


def test_one_bad_moment_and_a_handful_of_requests_change_little_and_nothing_measured_forgets() -> None:
    once = after(1, measured(0.0, 0.0))
    assert once.prefill_factor < 1.016 and once.decode_factor < 1.016
    assert after(1, measured(0.0, 0.0, count=1)).decode_factor < 1.002
    memory = after(200, measured(None, None), Memory(prefill_factor=1.4, decode_factor=0.8))
    assert 1.0 < memory.prefill_factor < 1.3 and 0.83 < memory.decode_factor < 1.0


def test_first_tokens_that_wait_for_room_at_decode_workers_are_not_blamed_on_prefill_workers() -> None:
    memory = corrected(Memory(), measured(0.0, 0.0), outlook_now(), Split(4, 1))
    assert outlook_now().decode.ok[1] < 0.9
    assert memory.prefill_factor == 1.0

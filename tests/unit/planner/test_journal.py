"""Steps as they are kept and shown."""

from __future__ import annotations

from dataclasses import replace

from vllm_pd.planner.journal import (
    AT_LEAST_EVERY_S,
    Journal,
    Step,
    as_dict,
    as_text,
    begin_step,
    decode_steps,
    encode_step,
    with_outcome,
)
from vllm_pd.planner.metrics import Did
from vllm_pd.planner.model import AddAction, GiveUp, MoveAction, Plan, RemoveAction
from vllm_pd.state.base import Epoch, Role, WorkerId

MOVE = MoveAction(WorkerId("a:1"), Epoch(5), Role.DECODE, "with 1P+2D more meet their targets")
PLAN = Plan(
    1000.0,
    (MOVE, AddAction(Role.PREFILL, 2, "too few"), RemoveAction(WorkerId("b:1"), Epoch(6), "too many")),
    (GiveUp(Role.DECODE, 1, "it did not come up"),),
    "a:1 becomes decode.",
    ("In the last 10 s nothing arrived.", "2P+1D is not enough."),
    {"prefill_load": 0.125},
)


def step(at_s: float, verdict: str, plan: Plan | None = None) -> Step:
    made = plan or Plan(at_s, verdict=verdict, numbers={"x": 1.0})
    return begin_step(made, "p", at_s=at_s, planner="me", term=3, dry_run=False)


def test_a_step_comes_back_as_it_was_written() -> None:
    begun = step(1000.0, "", PLAN)
    assert begun.is_open
    assert [each.action for each in begun.done] == ["give_up", "move", "add", "remove"]
    ended = begun
    for index in range(4):
        ended = with_outcome(ended, index, Did.BEGUN, "as asked")
    assert not ended.is_open
    assert decode_steps([encode_step(begun), None, b"{", b'{"pool": 1}', encode_step(ended)]) == [begun, ended]


def test_the_text_says_what_was_done_why_and_what_came_of_it() -> None:
    text = as_text(with_outcome(with_outcome(step(1000.0, "", PLAN), 0, Did.BEGUN, ""), 1, Did.REFUSED, "It is held."))
    assert "a:1 becomes decode." in text
    assert "* move a:1 to decode -> refused: It is held." in text
    assert "because with 1P+2D more meet their targets" in text
    assert "* add 2 x prefill -> not known: its planner ended" in text
    assert "- 2P+1D is not enough." in text
    assert "prefill_load 0.125" in text
    assert "1970-01-01T00:16:40Z" in text
    assert as_dict(step(1000.0, "", PLAN))["done"][1]["worker"] == "a:1"


def test_only_what_is_new_is_kept_and_the_rest_is_counted() -> None:
    journal = Journal()
    assert journal.entry(step(0, "2P+4D stays, 0.91 of the requests.")) is not None
    assert journal.entry(step(10, "2P+4D stays, 0.87 of the requests.")) is None
    assert journal.entry(step(20, "1P+5D stays, 0.99 of the requests.")) is None
    other = journal.entry(step(30, "Nothing is known."))
    assert other is not None
    assert other.repeated == 2


def test_what_does_something_is_always_kept_and_so_is_what_comes_after() -> None:
    journal = Journal()
    journal.entry(step(0, "as it is"))
    for at_s in (10, 20):
        entry = journal.entry(replace(step(at_s, "", PLAN)))
        assert entry is not None
        assert len(entry.done) == 4
    assert journal.entry(step(30, "as it is")) is not None


def test_now_and_then_any_is_kept_also_after_a_clock_that_went_back() -> None:
    journal = Journal()
    journal.entry(step(0, "as it is"))
    assert journal.entry(step(AT_LEAST_EVERY_S - 1, "as it is")) is None
    assert journal.entry(step(AT_LEAST_EVERY_S, "as it is")) is not None
    assert journal.entry(step(3, "as it is")) is not None

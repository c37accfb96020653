"""What a request amounts to, what a fault may excuse, and how the page shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.faults.aborts import Aborts
from tests.faults.injections import MATRIX, Fault, Target, allowed
from tests.faults.matrix import Row
from tests.faults.phases import Phase
from tests.faults.questions import Question
from tests.faults.results import Results
from tests.faults.scenes import Scene
from tests.faults.shot import Outcome, Shot
from tests.faults.table import page

QUESTION = Question("/v1/completions", {"prompt": "x"}, "one two three", "length")


def shot(**fields: Any) -> Shot:
    made = Shot("flt-a-1", QUESTION, stream=fields.pop("stream", True), fields={})
    for name, value in ({"status": 200, "text": QUESTION.text, "finish_reason": "length"} | fields).items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, Outcome.OK),
        ({"text": "one"}, Outcome.WRONG),
        ({"text": "one four"}, Outcome.WRONG),
        ({"finish_reason": "stop"}, Outcome.WRONG),
        ({"text": "one", "error": "the worker died"}, Outcome.ENDED),
        ({"text": "other", "error": "the worker died"}, Outcome.WRONG),
        ({"status": 503, "text": "", "error": "nobody decodes"}, Outcome.REFUSED),
        ({"status": 503, "text": ""}, Outcome.BROKEN),
        ({"text": "one", "problem": "broken"}, Outcome.BROKEN),
        ({"text": "one", "problem": "late"}, Outcome.LATE),
        ({"status": 0, "text": "", "problem": "unreachable"}, Outcome.UNREACHABLE),
        ({"text": "unknown so far", "problem": "left"}, Outcome.LEFT),
    ],
)
def test_outcome(fields: dict[str, Any], wanted: Outcome) -> None:
    assert shot(**fields).outcome is wanted


def test_answers_and_events_are_read() -> None:
    whole = shot(text="", finish_reason="", stream=False)
    whole.read_answer(b'{"choices": [{"message": {"content": "one two three"}, "finish_reason": "length"}]}')
    assert whole.outcome is Outcome.OK
    refused = shot(text="", finish_reason="", status=503)
    refused.read_answer(b'{"error": {"message": "no worker"}}')
    assert refused.outcome is Outcome.REFUSED and refused.error == "no worker"
    silent = shot(text="", finish_reason="", status=500)
    silent.read_answer(b"<html>")
    assert silent.outcome is Outcome.BROKEN
    stream = shot(text="", finish_reason="")
    assert stream.read_event('{"choices": [{"text": "one"}]}')
    assert not stream.read_event('{"error": {"message": "worker a died"}}')
    assert stream.outcome is Outcome.ENDED


ENDED = {"text": "one", "error": "died", "first": 1.0}
GONE = {"text": "", "status": 0, "problem": "unreachable"}
CUT = {"text": "", "status": 0, "problem": "broken"}


@pytest.mark.parametrize(
    ("target", "fault", "fields", "phase", "wanted"),
    [
        (Target.STORE, Fault.KILL, {}, Phase.QUEUED, True),
        (Target.STORE, Fault.KILL, {"text": "", "status": 503, "error": "no"}, Phase.QUEUED, False),
        (Target.DECODE, Fault.KILL, ENDED, Phase.STREAMING, False),
        (Target.DECODE, Fault.KILL, ENDED | {"can_continue": False}, Phase.STREAMING, True),
        (Target.PREFILL, Fault.KILL, ENDED | {"can_continue": False}, Phase.STREAMING, False),
        (Target.DECODE, Fault.STOP, {"text": "one", "problem": "late"}, Phase.DECODING, False),
        (Target.ROUTER, Fault.KILL, CUT, Phase.DECODING, True),
        (Target.ROUTER, Fault.STOP, CUT, Phase.DECODING, False),
        (Target.ROUTER, Fault.TERM, GONE, None, True),
        (Target.ROUTER, Fault.TERM, CUT, Phase.DECODING, False),
        (Target.ROUTER, Fault.RESET, CUT, Phase.STREAMING, True),
        (Target.ROUTER, Fault.KILL, {"text": "four"}, Phase.STREAMING, False),
    ],
)
def test_allowed(target: Target, fault: Fault, fields: dict[str, Any], phase: Phase | None, wanted: bool) -> None:
    assert allowed(target, fault, shot(**fields), phase) is wanted


def test_every_target_meets_every_fault() -> None:
    for target in Target:
        assert {fault for each, fault in MATRIX if each is target} >= set(list(Fault)[:6])


def test_the_page_shows_every_row_and_every_violation() -> None:
    row = Row("decode", "SIGKILL", requests=80, outcomes={"ok": 79, "error event": 1}, hit=7)
    row.phases = {str(phase): {"ok": 2} for phase in Phase} | {"streaming": {"ok": 3, "error event": 1}}
    row.reasons = {"200: Worker a | died": 1}
    row.wrongs = ["flt-1: late"]
    aborts = Aborts(dict.fromkeys(Phase, 4), dict.fromkeys(Phase, 0.5))
    found = Results()
    for each in (row, aborts, Scene("cold burst", requests=32, slowest=3.0)):
        found.took(each)
    text = page(found)
    assert "| decode | SIGKILL | 2 | 2 | 2 | 2 | 2 | 4 (1 error event) | 7 | 80 | 1 |" in text
    assert "80 requests in 1 rows; 1 violation." in text and "- decode, SIGKILL: flt-1: late" in text
    assert "Worker a \\| died" in text and "| cold burst | 32 | 0 | 3.0 |" in text
    assert "| streaming | 4 | 0.50 |" in text


def test_a_cell_that_is_run_again_takes_the_place_of_its_last_result(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    first = Results.load(kept)
    first.took(Row("decode", "SIGKILL", wrongs=["late"]))
    first.took(Row("prefill", "SIGKILL", requests=7))
    first.took(Scene("cold burst", requests=32))
    first.took(Aborts(dict.fromkeys(Phase, 4), dict.fromkeys(Phase, 0.5)))
    first.save(kept)
    again = Results.load(kept)
    again.took(Row("decode", "SIGKILL", requests=9))
    again.save(kept)
    found = Results.load(kept)
    assert [(row.target, row.requests, row.wrongs) for row in found.in_order()] == [
        ("prefill", 7, []),
        ("decode", 9, []),
    ]
    assert found.scenes["cold burst"].requests == 32 and found.aborts == first.aborts and not found.is_whole
    kept.write_text('{"rows": [{"target": "decode", "colour": 1}]}')
    assert Results.load(kept) == Results()

"""One request of the load: what was asked, what came back and when, and what that amounts to."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tests.faults.questions import Question


class Outcome(StrEnum):
    """How a request ended."""

    OK = "ok"
    WRONG = "wrong answer"
    """Other tokens than those of the right answer, or an answer that calls itself complete and is not."""
    REFUSED = "refused"
    """A status that is no success, with its reason."""
    ENDED = "error event"
    """A stream of right tokens, ended by an event that says why."""
    BROKEN = "broken"
    """No reason was given: the connection ended, or the error says nothing."""
    UNREACHABLE = "unreachable"
    """Nobody took the connection."""
    LATE = "late"
    LEFT = "left"
    """The client went away, as it was told to."""


@dataclass(slots=True)
class Shot:
    """Times are monotonic seconds, 0 for what did not happen."""

    name: str
    question: Question
    stream: bool
    fields: dict[str, Any]
    """What the request has besides the question's own fields."""
    can_continue: bool = True
    """Whether a stream of it can go on at another worker."""
    sent: float = 0.0
    first: float = 0.0
    """The first token of a stream."""
    last: float = 0.0
    ended: float = 0.0
    stall: float = 0.0
    """Longest time between two pieces of a stream."""
    status: int = 0
    text: str = ""
    finish_reason: str = ""
    error: str = ""
    """What the server said went wrong."""
    problem: str = ""
    """What the client ran into: `unreachable`, `broken`, `late` or `left`."""
    decision: str = ""
    """The router's account of its choice."""

    @property
    def outcome(self) -> Outcome:
        """What it amounts to; of a request that has ended."""
        if self.problem == "left":
            return Outcome.LEFT
        if not self.question.text.startswith(self.text):
            return Outcome.WRONG
        if self.problem:
            return Outcome[self.problem.upper()]
        if self.status != 200:
            return Outcome.REFUSED if self.status and self.error else Outcome.BROKEN
        if self.error:
            return Outcome.ENDED
        whole = self.text == self.question.text and self.finish_reason == self.question.finish_reason
        return Outcome.OK if whole else Outcome.WRONG

    def describe(self) -> str:
        """For the message of a failed check."""
        took = f"{self.ended - self.sent:.1f} s" if self.ended else "not ended"
        kind = f"{'chat' if self.question.is_chat else 'completion'}{', stream' if self.stream else ''}"
        got = f"{self.outcome}, status {self.status}, {len(self.text)} of {len(self.question.text)} characters"
        if self.outcome is Outcome.WRONG:
            got += f", got {self.text!r}, wanted {self.question.text!r}, finish reason {self.finish_reason!r}"
        return f"{self.name} ({kind}): {got} after {took}; {self.error or self.problem or 'no error'}"

    def read_answer(self, body: bytes) -> None:
        """Take in a whole answer."""
        try:
            answer = json.loads(body)
        except ValueError:
            self.error = ""
            return
        self.error = _message(answer)
        for choice in answer.get("choices") or []:
            self._take(choice)

    def read_event(self, data: str) -> bool:
        """Take in one event of a stream; whether it brought text."""
        event = json.loads(data)
        self.error = self.error or _message(event)
        before = len(self.text)
        for choice in event.get("choices") or []:
            self._take(choice)
        return len(self.text) > before

    def _take(self, choice: dict[str, Any]) -> None:
        part = choice.get("delta") or choice.get("message") or {}
        self.text += choice.get("text") or part.get("content") or ""
        self.finish_reason = choice.get("finish_reason") or self.finish_reason


def _message(answer: Any) -> str:
    error = answer.get("error") if isinstance(answer, dict) else None
    return str(error.get("message") or "") if isinstance(error, dict) else str(error or "")

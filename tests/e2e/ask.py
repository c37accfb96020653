"""Greedy questions to an OpenAI endpoint, and answers compared token by token."""

from __future__ import annotations

import io
import json
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Any

TIMEOUT_S = 120.0
TIE = 1e-4
"""Two candidates whose log probabilities differ by less are a tie: which one wins depends on the order of sums."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One greedy request. `body` lacks model, stream and the sampling fields, which are the same for all."""

    name: str
    kind: str
    """`chat` or `completion`."""
    body: dict[str, Any]
    stream: bool = False
    max_tokens: int = 12


@dataclass(frozen=True, slots=True)
class Step:
    """One generated token: its text, and the log probabilities of the best candidates."""

    text: str
    best: dict[str, float]

    @property
    def is_tie(self) -> bool:
        top = sorted(self.best.values(), reverse=True)
        return len(top) > 1 and top[0] - top[1] < TIE


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    steps: tuple[Step, ...]
    finish_reason: str
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A base URL and the model to ask for."""

    url: str
    model: str

    def post(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Any:
        """The decoded JSON answer. Raises urllib.error.HTTPError, whose body a failing test shows."""
        with _open(self._request(path, body, headers)) as response:
            return json.load(response)

    def ask(self, prompt: Prompt) -> Answer:
        """A greedy answer with the log probabilities of the two best candidates of each step."""
        chat = prompt.kind == "chat"
        path = "/v1/chat/completions" if chat else "/v1/completions"
        logprobs = {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}
        body = {
            "model": self.model, "temperature": 0, "max_tokens": prompt.max_tokens, "ignore_eos": True,
            **logprobs, **prompt.body,
        }  # fmt: skip
        if prompt.stream:
            choices = self._stream(path, {**body, "stream": True})
        else:
            choices = [self.post(path, body)["choices"][0]]
        return _chat_answer(choices) if chat else _completion_answer(choices)

    def token_ids(self, text: str) -> list[int]:
        ids: list[int] = self.post("/tokenize", {"model": self.model, "prompt": text, "add_special_tokens": False})[
            "tokens"
        ]
        return ids

    def _stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        choices = []
        with _open(self._request(path, body, None)) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = [line.decode().strip() for line in response]
        data = [line.removeprefix("data: ") for line in lines if line]
        assert data[-1] == "[DONE]"
        for event in data[:-1]:
            choices += json.loads(event)["choices"]
        return choices

    def _request(self, path: str, body: dict[str, Any], headers: dict[str, str] | None) -> urllib.request.Request:
        return urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"content-type": "application/json", **(headers or {})}
        )


def _open(request: urllib.request.Request) -> Any:
    """The response. Raises HTTPError with a note of what the server said, which can still be read from it."""
    try:
        return urllib.request.urlopen(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as e:
        said = e.read()
        error = urllib.error.HTTPError(e.url, e.code, e.reason, e.headers, io.BytesIO(said))
        error.add_note(f"{request.full_url} said: {said.decode(errors='replace')}")
        raise error from None


def _chat_answer(choices: list[dict[str, Any]]) -> Answer:
    parts = [choice.get("delta") or choice.get("message") or {} for choice in choices]
    steps = [
        Step(entry["token"], {top["token"]: top["logprob"] for top in entry["top_logprobs"]})
        for choice in choices
        if choice.get("logprobs")
        for entry in choice["logprobs"]["content"]
    ]
    return Answer("".join(part.get("content") or "" for part in parts), tuple(steps), _finish(choices))


def _completion_answer(choices: list[dict[str, Any]]) -> Answer:
    steps = [
        Step(token, best)
        for choice in choices
        if choice.get("logprobs")
        for token, best in zip(choice["logprobs"]["tokens"], choice["logprobs"]["top_logprobs"], strict=True)
    ]
    return Answer("".join(choice["text"] for choice in choices), tuple(steps), _finish(choices))


def _finish(choices: list[dict[str, Any]]) -> str:
    return next((str(c["finish_reason"]) for c in reversed(choices) if c.get("finish_reason")), "")


@dataclass(frozen=True, slots=True)
class Verdict:
    """How two answers compare: equal, parted at a tie (both right), or different (one is wrong)."""

    equal: bool
    tie_at: int | None = None
    detail: str = ""


def compare(wanted: Answer, got: Answer) -> Verdict:
    """Token by token; after a tie the two may go different ways and the rest is not compared."""
    for at, (a, b) in enumerate(zip(wanted.steps, got.steps, strict=False)):
        if a.text != b.text:
            if a.is_tie or b.is_tie:
                return Verdict(False, at)
            return Verdict(False, None, f"token {at}: wanted {a.text!r} {a.best}, got {b.text!r} {b.best}")
    if len(wanted.steps) != len(got.steps) or wanted.finish_reason != got.finish_reason or wanted.text != got.text:
        return Verdict(False, None, f"wanted {wanted}, got {got}")
    return Verdict(True)

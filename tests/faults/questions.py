"""Greedy questions with answers that leave no choice: at no step do the two best candidates come close to a tie."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tests.e2e.ask import Answer, Endpoint, Prompt
from tests.e2e.prompts import TEXTS

MARGIN = 3e-4
"""Log probabilities that differ by less could change places when sums are made in another order."""
_CANDIDATES = 120
_AT_ONCE = 6
_WORDS = " ".join(TEXTS.values()).split()


@dataclass(frozen=True, slots=True)
class Question:
    """A request and the only right answer to it. `body` lacks model and stream."""

    path: str
    body: dict[str, Any]
    text: str
    finish_reason: str

    @property
    def is_chat(self) -> bool:
        return self.path == "/v1/chat/completions"


def pool(endpoint: Endpoint, count: int, *, seed: int = 1) -> list[Question]:
    """`count` questions of 40 to 500 tokens and 6 to 48 answer tokens, with what `endpoint` answers when asked alone.

    Raises:
        AssertionError: too few have answers without near ties.
    """
    prompts = [_prompt(number, random.Random(seed * 1000 + number)) for number in range(_CANDIDATES)]
    found: list[Question] = []
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        for start in range(0, len(prompts), _AT_ONCE):
            some = prompts[start : start + _AT_ONCE]
            found += [question(p, a) for p, a in zip(some, threads.map(endpoint.ask, some), strict=True) if is_clear(a)]
            if len(found) >= count:
                return found[:count]
    raise AssertionError(f"only {len(found)} of {len(prompts)} questions have answers without near ties")


def question(prompt: Prompt, answer: Answer) -> Question:
    """What the load asks, without the log probabilities."""
    path = "/v1/chat/completions" if prompt.kind == "chat" else "/v1/completions"
    body = {**prompt.body, "temperature": 0, "max_tokens": prompt.max_tokens, "ignore_eos": True}
    return Question(path, body, answer.text, answer.finish_reason)


def is_clear(answer: Answer) -> bool:
    """Whether each step has one candidate that is clearly the best."""
    for step in answer.steps:
        top = sorted(step.best.values(), reverse=True)
        if len(top) > 1 and top[0] - top[1] < MARGIN:
            return False
    return True


def _prompt(number: int, chance: random.Random) -> Prompt:
    # Half of them begin alike, as with a common system prompt.
    words = chance.sample(_WORDS, chance.randint(10, 100))
    text = " ".join([*(_WORDS[:60] if number % 4 < 2 else []), *words])
    longest = chance.choice((6, 16, 32, 48))
    if number % 2:
        messages = [{"role": "system", "content": "You answer in one sentence."}, {"role": "user", "content": text}]
        return Prompt(str(number), "chat", {"messages": messages}, max_tokens=longest)
    return Prompt(str(number), "completion", {"prompt": text}, max_tokens=longest)

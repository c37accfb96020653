"""One leg of a request on one engine, counted there from the decision on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from vllm_pd.router.prompt_blocks import PromptBlocks
from vllm_pd.router.worker import Worker
from vllm_pd.routing.ledger import EngineLedger
from vllm_pd.routing.model import Ask, Choice


@dataclass(frozen=True, slots=True)
class Placed:
    """The engine for a leg, and what is known of the request there."""

    worker: Worker
    engine: EngineLedger
    ask: Ask
    prompt: PromptBlocks
    choice: Choice
    lead: int = 0
    """For a prefill leg: blocks of the prompt that this engine has, or will have, more than any other that could take
    it. Below 0: another one has more."""

    @property
    def predicted_cached(self) -> int:
        """Prompt tokens that need not be computed there."""
        return self.ask.tokens - self.choice.best.uncached


class Attempt:
    """A leg that is under way. Counted on its engine at once, and until `end`.

    Args:
        name: grows with every attempt of this router.
        clock: monotonic seconds, that of the ledgers.
        remote: another worker computes the prompt.
        silent: the first byte of the answer is not its first token.
        orders: whether this router says in which order engines take waiting prompts, where they let it.
        announced: where the announcements of its cache were before it; None where they prove nothing.
    """

    __slots__ = ("_clock", "_name", "_silent", "announced", "placed", "remote", "turn")

    def __init__(
        self,
        placed: Placed,
        name: int,
        clock: Callable[[], float],
        *,
        remote: bool = False,
        silent: bool = False,
        orders: bool = True,
        announced: int | None = None,
    ) -> None:
        self.placed = placed
        self.remote = remote
        self.announced = announced
        self._name = name
        self._silent = silent
        self._clock = clock
        now = clock()
        turn = placed.engine.begin(
            name,
            placed.ask,
            placed.choice.best.overlap,
            now,
            remote=remote,
            silent=silent,
            pick=name,
            patience=placed.choice.patience,
        )
        self.turn: int | None = None
        """Of its prompt, to tell the engine; None if that takes requests as they come, or has nothing to compute.
        Milliseconds since 1970, so that the requests of several routers mix rightly."""
        if orders and placed.engine.ordered and not remote:
            self.turn = round((time.time() + turn - now) * 1000)

    @property
    def worker(self) -> Worker:
        return self.placed.worker

    def prefilled(self) -> None:
        """The prompt has been computed elsewhere, and the request is sent to this engine now."""
        self.placed.engine.prefilled(self._name, self._clock())

    def first_byte(self, took: float | None = None) -> None:
        """The answer's body has begun. `took`: seconds since the engine got the request, if it has said so."""
        if not self._silent:
            self.placed.engine.first_token(self._name, self._clock(), took)

    def end(self, output_tokens: int = 0) -> None:
        """It has ended, in whatever way. Idempotent."""
        self.placed.engine.finish(self._name, self._clock(), output_tokens)

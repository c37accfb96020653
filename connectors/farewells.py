"""Keeps a decode engine stepping while it still has to tell a prefill worker that blocks will not be read.

A hand-off that is given up before it was scheduled is answered by a message to the prefill worker, sent by a step of
the engine. To a worker that it has not met yet it first shakes hands, in the background, and sends the message with a
step after that: an engine without other work would make none, and the blocks would stay until their lease ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_pd.connectors.handoff_lease import is_handoff

STEPPING_S = 6.0
"""vLLM's handshake takes five seconds at most."""


class Farewells:
    """Of one engine. Times are of the caller's monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._until = 0.0

    def finished(self, params: Mapping[str, Any] | None, now: float) -> None:
        """A request ended; `params` are its own, before its connector has seen the end."""
        if is_handoff(params):
            self.given_up(now)

    def given_up(self, now: float) -> None:
        """A hand-off was given up that has not come here."""
        self._until = now + STEPPING_S

    def are_due(self, now: float) -> bool:
        """Whether the engine should go on, even with nothing to compute."""
        return now < self._until

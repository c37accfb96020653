"""Which hand-offs have come to a decode engine, and which it will not read because their router gave them up. Pure.

Blocks must not be let go while they may be read, and a router cannot know how far its request has come: between the two
are an API server, its queues and the engine's. Here it is known. A hand-off that is given up before it has come is
refused when it does come; one that has come ends as its request ends, and that tells the prefill worker.

What is remembered is bounded. Where too much had to be forgotten, nothing is taken for "has not come": the blocks then
stay until their lease ends.
"""

from __future__ import annotations

from collections import Counter

from vllm_pd.connectors.read_leases import Blocks

REMEMBER_S = 120.0
"""After the end of a request, whose read may go on for a while. A router gives up at once, or not at all."""
MAX_ENDED = 65_536
"""Hand-offs whose request has ended."""
MAX_GIVEN_UP = 8_192


class HandoffArrivals:
    """Of one engine. Times are of the caller's monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._requests: dict[str, Blocks] = {}
        """Those that have not ended."""
        self._here: Counter[Blocks] = Counter()
        """How many of them each is of."""
        self._ended: dict[Blocks, float] = {}
        """Until when they are remembered, in this order."""
        self._unsure_until = float("-inf")
        """Until then one of those that were forgotten too early might be asked for."""
        self._given_up: dict[Blocks, float] = {}
        """Until when each must be refused."""

    def arrived(self, request_id: str, blocks: Blocks, now: float) -> bool:
        """A request that would read these blocks is new to the engine; whether it must not."""
        if self._given_up.get(blocks, float("-inf")) > now:
            return True
        self._requests[request_id] = blocks
        self._here[blocks] += 1
        return False

    def ended(self, request_id: str, now: float) -> None:
        """The request ended, in whatever way. Others than those that arrived are ignored."""
        blocks = self._requests.pop(request_id, None)
        if blocks is None:
            return
        self._here[blocks] -= 1
        if not self._here[blocks]:
            del self._here[blocks]
        self._ended.pop(blocks, None)
        self._ended[blocks] = now + REMEMBER_S
        while (oldest := next(iter(self._ended), None)) is not None:
            until = self._ended[oldest]
            if until > now:
                if len(self._ended) <= MAX_ENDED:
                    break
                self._unsure_until = until
            del self._ended[oldest]

    def give_up(self, blocks: Blocks, until: float, now: float) -> bool:
        """Nobody wants what would be computed with these blocks.

        Args:
            until: from then on nothing would read them anyway.

        Returns:
            Whether it is certain that nothing has read, reads or will read them here.
        """
        if blocks in self._here or blocks in self._ended or now < self._unsure_until:
            return False
        if len(self._given_up) >= MAX_GIVEN_UP:
            self._given_up = {which: end for which, end in self._given_up.items() if end > now}
            if len(self._given_up) >= MAX_GIVEN_UP:
                return False
        self._given_up[blocks] = max(until, self._given_up.get(blocks, until))
        return True

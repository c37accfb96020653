"""The way out: no new requests, those in progress get their time, then what is left is cut."""

from __future__ import annotations

import asyncio

STOPPING = "This router is draining, because it is being stopped; send the request to another one."


class Drain:
    """Counts the requests in progress. Belongs to one router."""

    def __init__(self) -> None:
        self._requests = 0
        self._idle = asyncio.Event()
        self.draining = False
        """No new request is to be begun."""

    def begin(self) -> None:
        """A request is in progress; `end` must follow."""
        self._requests += 1

    def end(self) -> None:
        """It has ended, in whatever way."""
        self._requests -= 1
        if self.draining and not self._requests:
            self._idle.set()

    async def finish(self, seconds: float) -> bool:
        """Begin no more, and wait until nothing is in progress, at most so long. Whether that is so."""
        self.draining = True
        if not self._requests:
            return True
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

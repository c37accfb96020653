"""What an engine has to do for others than this router: by report, shrinking as time passes."""

from __future__ import annotations

from vllm_pd.routing.model import Rates


class OthersWork:
    """Of one engine. Times are the ledger's.

    Attributes:
        tokens, requests: prompt tokens that it has to compute for other routers, and the requests that these are of.
    """

    __slots__ = ("_at", "_running", "_seconds", "_share", "requests", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self.requests = 0
        self._seconds = 0.0
        self._share = 1.0
        self._at = 0.0
        self._running = 0

    def runs(self, requests: int) -> int:
        """So many it runs for others, at least. Returns how many more these are than before."""
        more, self._running = requests - self._running, requests
        return more

    def count(self, rates: Rates, unknown_s: float, own_s: float, now: float) -> None:
        """Predict anew how long it will take.

        Args:
            unknown_s: seconds of requests that no router told of: somebody asks the engine directly.
            own_s: seconds of what it has to do for this router. The engine serves both in turn, so the others' shrinks
                only by its part of the time.
        """
        seconds = self.tokens * rates.prefill_token + self.requests * rates.prefill_base + unknown_s
        self._seconds, self._at = seconds, now
        self._share = seconds / (seconds + own_s) if seconds else 1.0

    def left(self, now: float) -> float:
        """Predicted seconds."""
        since = max(0.0, now - self._at)
        return max(0.0, self._seconds - since * self._share)

"""Which worker a client's session went to last. In memory, bounded, one router's own."""

from __future__ import annotations

from vllm_pd.state.base import WorkerId

MAX_SESSIONS = 65_536
MAX_NAME = 256


class Sessions:
    """Session name -> worker, forgotten `ttl_s` seconds after the last use; of too many the oldest go first."""

    def __init__(self, ttl_s: float, limit: int = MAX_SESSIONS) -> None:
        self._ttl_s = ttl_s
        self._limit = limit
        self._last: dict[str, tuple[WorkerId, float]] = {}

    def __len__(self) -> int:
        return len(self._last)

    def worker(self, name: str, now: float) -> WorkerId | None:
        """Where the session went last, or None. `now` is monotonic seconds."""
        found = self._last.get(name)
        return found[0] if found is not None and found[1] > now else None

    def note(self, name: str, worker: WorkerId, now: float) -> None:
        """The session went to `worker` now. A name too long for a sensible one is not kept."""
        if not name or len(name) > MAX_NAME:
            return
        # Put at the end: the dictionary stays ordered by last use, so what has ended is in front.
        self._last.pop(name, None)
        self._last[name] = (worker, now + self._ttl_s)
        for _ in range(2):
            oldest = next(iter(self._last))
            if self._last[oldest][1] > now and len(self._last) <= self._limit:
                break
            del self._last[oldest]

"""Until when a hand-off may be read: a prefill worker says it, a decode worker obeys it.

A prefill worker keeps finished blocks for a lease (`kv_lease_duration`, 30 s) that heartbeats of the decode worker
extend; afterwards it uses them for something else. vLLM's pull mode tells the decode worker neither, so a request that
was held up (a stopped process, a full queue in front of the API server) would read whatever is in the blocks by then,
without any error. So the hand-off parameters carry the end of the lease, and a request that comes to its blocks later
than the lease allows is computed anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FIELD = "pd_lease_until_ms"
DEFAULT_LEASE_S = 30
"""vLLM's default of `kv_lease_duration` (nixl/base_scheduler.py)."""

MARGIN_S = 5.0
"""Subtracted from every lease: clocks of two hosts differ, and the read itself takes time. At most a third of it."""


class HandoffLease:
    """Scheduler-side bookkeeping of one engine. Pure: the caller passes the clocks, in seconds.

    On arrival the two hosts' wall clocks are compared. Once the scheduler knows a request, each step may send the
    heartbeat that extends the lease by two thirds of its length; if this process then stood still for longer than
    that, its own monotonic clock, which goes on while a process is stopped, shows it.
    """

    def __init__(self, lease_s: float = DEFAULT_LEASE_S) -> None:
        self._lease_s = lease_s
        margin = min(MARGIN_S, lease_s / 3)
        self._first_s = lease_s - margin
        self._extension_s = lease_s * 2 / 3 - margin
        self._stepped = float("-inf")
        self._arrived: dict[str, float] = {}

    def stamp(self, params: dict[str, Any] | None, wall: float) -> dict[str, Any] | None:
        """Add the end of the lease to parameters that a prefill worker returns now; others stay as they are."""
        if params and params.get("do_remote_prefill"):
            params[FIELD] = int((wall + self._first_s) * 1000)
        return params

    def arrived(self, request_id: str, params: Mapping[str, Any] | None, wall: float, monotonic: float) -> bool:
        """Note a request that is new to the scheduler; whether its blocks must not be read any more."""
        if not is_handoff(params):
            return False
        self._arrived[request_id] = monotonic
        until = params.get(FIELD) if params else None
        return isinstance(until, int) and wall * 1000 > until

    def stepped(self, monotonic: float) -> None:
        """A scheduler step, with which heartbeats go out."""
        self._stepped = monotonic

    def is_stale(self, request_id: str, monotonic: float) -> bool:
        """Whether this process stood still so long since it could last send a heartbeat that the lease may be over."""
        if request_id not in self._arrived:
            return False
        return monotonic - max(self._arrived[request_id], self._stepped) > self._extension_s

    def forget(self, request_id: str) -> None:
        """The request loaded its blocks, gave them up, or ended."""
        self._arrived.pop(request_id, None)


def is_handoff(params: Mapping[str, Any] | None) -> bool:
    """Whether a request is to read blocks from a prefill worker."""
    return bool(params and params.get("do_remote_prefill"))

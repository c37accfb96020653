"""Until when a hand-off may be read: a prefill worker says it, a decode worker obeys it.

A prefill worker keeps finished blocks for a lease (`kv_lease_duration`, 30 s) that heartbeats of the decode worker
extend; afterwards it uses them for something else. vLLM's pull mode tells the decode worker neither, so a request that
was held up (a stopped process, a full queue) would read whatever is in the blocks by then, without any error. So the
hand-off parameters carry the end of the lease and the length of an extension, and a request that comes to its blocks
later than they allow is computed anew. Whether the read was over in time, too, is for `read_leases` to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_pd.connectors.read_leases import ReadLease
from vllm_pd.given_up import LEASE_END_FIELD

FIELD = LEASE_END_FIELD
EXTENSION_FIELD = "pd_lease_extension_ms"
DEFAULT_LEASE_S = 30
"""vLLM's default of `kv_lease_duration` (nixl/base_scheduler.py)."""

MARGIN_S = 5.0
"""Subtracted from every lease: clocks of two hosts differ, and the read itself takes time. At most a third of it."""

_BEATS_THAT_COUNT = 2
"""vLLM spends a request's first heartbeat on the handshake, if there was none with that prefill worker yet."""


@dataclass(slots=True)
class _Wait:
    """A request that has not read its blocks yet. Times are of this process's monotonic clock, seconds."""

    until: float
    extension_s: float
    beats: int = 0


class HandoffLease:
    """Scheduler-side bookkeeping of one engine. Pure: the caller passes the clocks, in seconds.

    On arrival the two hosts' wall clocks are compared, once. From then on this process's monotonic clock counts, which
    goes on while a process is stopped: what is left of the lease, and what each heartbeat adds to it.
    """

    def __init__(self, lease_s: float = DEFAULT_LEASE_S) -> None:
        margin = min(MARGIN_S, lease_s / 3)
        self._first_s = lease_s - margin
        # vLLM extends by whole seconds, rounded down.
        self._extension_s = max(0.0, int(lease_s) * 2 // 3 - margin)
        self._waits: dict[str, _Wait] = {}

    def stamp(self, params: dict[str, Any] | None, wall: float) -> dict[str, Any] | None:
        """Add the lease to parameters that a prefill worker returns now; others stay as they are."""
        if params and params.get("do_remote_prefill"):
            params[FIELD] = int((wall + self._first_s) * 1000)
            params[EXTENSION_FIELD] = int(self._extension_s * 1000)
        return params

    def arrived(self, request_id: str, params: Mapping[str, Any] | None, wall: float, monotonic: float) -> bool:
        """Note a request that is new to the scheduler; whether its blocks must not be read any more.

        Parameters without an end of the lease (of a prefill worker without vllm-pd) are taken for fresh.
        """
        if params is None or not is_handoff(params):
            return False
        until, extension = _milliseconds(params.get(FIELD)), _milliseconds(params.get(EXTENSION_FIELD))
        left_s = self._first_s if until is None else until / 1000 - wall
        extension_s = self._extension_s if extension is None else extension / 1000
        self._waits[request_id] = _Wait(monotonic + left_s, extension_s)
        return left_s < 0

    def for_workers(
        self, request_id: str, params: Mapping[str, Any] | None, wall: float, monotonic: float
    ) -> ReadLease | None:
        """What the workers must know of a request that has arrived and may read; None if there is nothing to read."""
        wait = self._waits.get(request_id)
        engine, request = (params or {}).get("remote_engine_id"), (params or {}).get("remote_request_id")
        if wait is None or not isinstance(engine, str) or not isinstance(request, str):
            return None
        return ReadLease((engine, request), wall + wait.until - monotonic, wait.extension_s)

    def heartbeat(self, monotonic: float) -> None:
        """A scheduler step with which heartbeats for every waiting request go out."""
        for wait in self._waits.values():
            wait.beats += 1
            if wait.beats >= _BEATS_THAT_COUNT:
                wait.until = max(wait.until, monotonic + wait.extension_s)

    def is_stale(self, request_id: str, monotonic: float) -> bool:
        """Whether the lease may be over: neither the time left on arrival nor any heartbeat since reaches this far."""
        wait = self._waits.get(request_id)
        return wait is not None and monotonic > wait.until

    def forget(self, request_id: str) -> None:
        """The request asked for its blocks, gave them up, or ended."""
        self._waits.pop(request_id, None)


def is_handoff(params: Mapping[str, Any] | None) -> bool:
    """Whether a request is to read blocks from a prefill worker."""
    return bool(params and params.get("do_remote_prefill"))


def _milliseconds(raw: Any) -> float | None:
    return float(raw) if isinstance(raw, int | float) and not isinstance(raw, bool) else None

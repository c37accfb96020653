"""Whether a read of a prefill worker's blocks was over before their lease was. Worker side of a decode engine, pure.

The scheduler checks the lease before it asks for a read (`handoff_lease`), and much may pass until the read is over:
the process may be stopped, the other side may be, the network may hang. Blocks that were read after their lease may
hold another request's KV, so the time is looked at again when the read is done. The heartbeats that count here are
those that were really sent, while the lease held.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

KEEP_S = 60.0
"""How long a lease that ended is remembered while nobody reads under it."""

Blocks = tuple[str, str]
"""What a lease is on: engine id of the prefill worker, id of the request there."""


@dataclass(frozen=True, slots=True)
class ReadLease:
    """What the scheduler knows of a lease when the request arrives. Sent to the workers, which may be other hosts."""

    blocks: Blocks
    until: float
    """Its end by the wall clock, in seconds, with the margin taken off."""
    extension_s: float
    """What a heartbeat adds, counted from when it is sent."""


@dataclass(slots=True)
class _Lease:
    until: float
    extension_s: float
    reading: bool = False


class ReadLeases:
    """Of one worker process. `monotonic` is its own clock, in seconds; it goes on while the process is stopped."""

    def __init__(self) -> None:
        self._leases: dict[Blocks, _Lease] = {}
        self._reads: dict[str, Blocks] = {}

    def learn(self, leases: Iterable[ReadLease], wall: float, monotonic: float) -> None:
        """Leases that are new. Those that nobody needs any more are forgotten."""
        came = [(lease.blocks, _Lease(monotonic + lease.until - wall, lease.extension_s)) for lease in leases]
        if not came:
            return
        old = monotonic - KEEP_S
        self._leases = {b: lease for b, lease in self._leases.items() if lease.reading or lease.until > old}
        for blocks, lease in came:
            self._leases.setdefault(blocks, lease)

    def beat(self, blocks: Iterable[Blocks], monotonic: float) -> None:
        """Heartbeats for these go out now. One that comes after the end revives nothing."""
        for which in blocks:
            lease = self._leases.get(which)
            if lease is not None and monotonic <= lease.until:
                lease.until = max(lease.until, monotonic + lease.extension_s)

    def begin(self, request_id: str, blocks: Blocks) -> None:
        """The request's read of these blocks is asked for."""
        lease = self._leases.get(blocks)
        if lease is not None:
            lease.reading = True
        self._reads[request_id] = blocks

    def late(self, finished: Iterable[str], monotonic: float) -> set[str]:
        """Which of these reads, seen to be over now, may have been so only after the end of their lease."""
        late = set()
        for request_id in finished:
            blocks = self._reads.pop(request_id, None)
            if blocks is None:
                continue
            lease = self._leases.pop(blocks, None)
            # Without a lease it was forgotten long after its end, or another request has read the blocks, which ends
            # it.
            if lease is None or monotonic > lease.until:
                late.add(request_id)
        return late

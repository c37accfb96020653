"""The leases that a prefill worker's NIXL half keeps on finished requests, ended early or a little late. Worker side.

Early: a router said that nobody will read the blocks. Late: a process that was stopped finds its leases over, and the
heartbeats that came meanwhile still unread in its sockets. Decode workers count on those, so a lease ends only some
time after it is first seen to be over.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

GRACE_S = 2.0
"""For messages that are in a socket to be taken out of it."""


class SendLeases:
    """Around `worker`, the worker half of vLLM's NIXL connector (`vllm_compat.NixlWorker`)."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._over: set[str] = set()
        """Requests whose grace has begun."""

    def let_go(self, request_ids: Iterable[str]) -> None:
        """Report these as sent with this step's results. One that this rank does not keep (any more) is left alone:
        every rank reports a request once, and the scheduler frees the blocks when all have."""
        worker = self._worker
        for request_id in request_ids:
            if worker._reqs_to_send.pop(request_id, None) is None:
                continue
            worker._reqs_to_process.discard(request_id)
            worker.consumer_notification_counts_by_req.pop(request_id, None)
            worker.expected_consumer_notifications_by_req.pop(request_id, None)
            # What is in here goes out with the results, through the accounting of all connectors.
            worker._replicated_pcp_done_sending.add(request_id)

    def give_grace(self, now: float) -> None:
        """Before leases are ended: those that are seen to be over for the first time last a little longer.

        Args:
            now: seconds of `time.perf_counter`, by which vLLM counts these leases.
        """
        leases = self._worker._reqs_to_send
        if not leases:
            self._over.clear()
            return
        self._over &= leases.keys()
        for request_id, until in leases.items():
            if until <= now:
                if request_id not in self._over:
                    self._over.add(request_id)
                    leases[request_id] = now + GRACE_S
            elif until > now + GRACE_S:
                self._over.discard(request_id)

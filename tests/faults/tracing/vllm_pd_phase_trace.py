"""A vLLM plugin of the fault tests: writes down in which phase each request of an engine is, as it changes.

This folder on PYTHONPATH makes it known to vLLM. `PHASE_TRACE` names the file; each line is monotonic seconds, request
id, phase. A line is one write, so that a process killed at any moment leaves whole lines.
"""

from __future__ import annotations

import os
import time
from typing import Any

FILE_VARIABLE = "PHASE_TRACE"


def register() -> None:
    """Called by vLLM in each of its processes; only the engine's ever schedules."""
    path = os.environ.get(FILE_VARIABLE)
    if not path:
        return
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import RequestStatus

    if hasattr(Scheduler, "phase_trace"):
        return
    trace = _Trace(path, RequestStatus)
    Scheduler.phase_trace = trace
    # The same set of requests is looked at wherever it may have changed.
    for name in ("add_request", "schedule", "update_from_output", "finish_requests"):
        setattr(Scheduler, name, _traced(getattr(Scheduler, name), trace))


def _traced(method: Any, trace: _Trace) -> Any:
    def traced(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        finally:
            trace.look(self.requests)

    return traced


class _Trace:
    def __init__(self, path: str, status: Any) -> None:
        self._path = path
        self._status = status
        self._file = -1
        self._phases: dict[str, str] = {}

    def look(self, requests: dict[str, Any]) -> None:
        seen = {name: self._phase(request) for name, request in requests.items()}
        if seen == self._phases:
            return
        if self._file < 0:
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        now = time.monotonic()
        gone = [(name, "gone") for name in self._phases.keys() - seen.keys()]
        changed = [(name, phase) for name, phase in seen.items() if self._phases.get(name) != phase]
        self._phases = seen
        os.write(self._file, "".join(f"{now:.6f} {name} {phase}\n" for name, phase in [*gone, *changed]).encode())

    def _phase(self, request: Any) -> str:
        if request.is_finished():
            return "held"
        if request.status == self._status.WAITING_FOR_REMOTE_KVS:
            return "transferring"
        if request.status != self._status.RUNNING:
            return "waiting"
        return "prefilling" if request.num_output_tokens == 0 else "decoding"

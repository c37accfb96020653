"""In which phase each request is: what the engines write down, and what the client has seen."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

_NAME = re.compile(r"flt-[0-9a-z]+-\d+")
"""What the tests call their requests; vLLM's own name of a request has it inside."""


class Phase(StrEnum):
    """Where a request is, in the order in which it gets there."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    TRANSFERRING = "transferring"
    WAITING = "waiting at decode"
    DECODING = "decoding"
    STREAMING = "streaming"


@dataclass(frozen=True, slots=True)
class Step:
    """A request of an engine entered a phase. `at` is monotonic seconds."""

    at: float
    worker: str
    name: str
    phase: str


@dataclass(frozen=True, slots=True)
class Where:
    """The phase of a request at one moment, and the workers that had it."""

    phase: Phase
    workers: frozenset[str]


def where(steps: Mapping[str, str], decoders: frozenset[str], *, has_streamed: bool) -> Where:
    """Put together one request's phases on its workers.

    Args:
        steps: worker to the phase that its engine wrote last; workers that never had it are left out.
        decoders: names of the workers that decode.
        has_streamed: the client has got the first token of a stream.
    """
    on = {worker: phase for worker, phase in steps.items() if phase != "gone"}
    at_decode = {phase for worker, phase in on.items() if worker in decoders}
    at_prefill = {phase for worker, phase in on.items() if worker not in decoders}
    if "decoding" in at_decode:
        phase = Phase.STREAMING if has_streamed else Phase.DECODING
    elif "prefilling" in at_decode | at_prefill or "decoding" in at_prefill:
        phase = Phase.PREFILLING
    elif "transferring" in at_decode:
        phase = Phase.TRANSFERRING
    elif "waiting" in at_decode or any(worker not in decoders for worker in steps if worker not in on):
        phase = Phase.WAITING
    elif "held" in at_prefill:
        # Prefilled, and the decode worker has not taken it yet.
        phase = Phase.WAITING
    elif has_streamed:
        phase = Phase.STREAMING
    else:
        phase = Phase.QUEUED
    return Where(phase, frozenset(on))


class Traces:
    """Reads what the engines write, as they write it.

    Args:
        files: worker to its file, which need not exist yet.
    """

    def __init__(self, files: Mapping[str, Path]) -> None:
        self.files = dict(files)
        self._read = dict.fromkeys(self.files, 0)
        self._phases: dict[str, dict[str, str]] = defaultdict(dict)

    def refresh(self) -> None:
        """Read on."""
        for worker, path in self.files.items():
            try:
                with path.open("rb") as file:
                    file.seek(self._read[worker])
                    data = file.read()
            except FileNotFoundError:
                continue
            whole = data[: data.rfind(b"\n") + 1]
            self._read[worker] += len(whole)
            for step in parse(worker, whole.decode()):
                self._phases[step.name][step.worker] = step.phase

    def of(self, name: str) -> Mapping[str, str]:
        """Worker to phase of one request, as of the last `refresh`."""
        return self._phases.get(name, {})


def parse(worker: str, text: str) -> Iterable[Step]:
    """The steps in a piece of a trace that ends with a line; requests of others than these tests are left out."""
    for line in text.splitlines():
        at, name, phase = line.split(" ")
        if match := _NAME.search(name):
            yield Step(float(at), worker, match[0], phase)

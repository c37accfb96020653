"""Made-up arrivals for `benchmarks.disagg`: what makes splitting pay, and what makes it not."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import merge

from vllm_pd.sim.trace import TraceRequest, made_key, make_trace

BLOCK = 16


@dataclass(frozen=True, slots=True)
class Flow:
    """Independent requests, no two with a common beginning. Lengths are exponential around their means."""

    rate: float
    """A second."""
    prompt: int
    output: int
    shortest: int = BLOCK


@dataclass(frozen=True, slots=True)
class Workload:
    """A name, the cluster and what arrives."""

    name: str
    prefill: int
    decode: int
    flows: tuple[Flow, ...] = ()
    """Empty: conversations whose turns share what was said before."""

    def requests(self, seconds: float) -> list[TraceRequest]:
        """All arrivals of so many seconds; the same each time."""
        if not self.flows:
            made = make_trace(sessions=int(2 * seconds), turns=6, rate=2.0, block_size=BLOCK)
            return [request for request in made if request.at < seconds]
        return list(merge(*(_arrivals(flow, n, seconds) for n, flow in enumerate(self.flows)), key=lambda r: r.at))


SHORT, CHAT = (300, 150), (100, 500)
WORKLOADS = (
    Workload("short prompts, idle", 1, 1, (Flow(1, *SHORT),)),
    Workload("short prompts, busy", 1, 1, (Flow(20, *SHORT),)),
    Workload("long prompts, idle", 1, 1, (Flow(0.3, 8000, 150),)),
    Workload("long prompts, busy", 1, 1, (Flow(3, 8000, 150),)),
    Workload("long prompts, too many", 1, 1, (Flow(8, 8000, 150),)),
    Workload("streams, some long prompts", 1, 1, (Flow(4, *CHAT), Flow(1, 8000, 150))),
    Workload("streams, few very long prompts", 1, 1, (Flow(8, *CHAT), Flow(0.3, 30_000, 150))),
    Workload("mixed", 2, 2, (Flow(10, *SHORT), Flow(3, 8000, 150))),
    Workload("mixed, busy", 2, 2, (Flow(30, *SHORT), Flow(8, 8000, 150))),
    Workload("mixed, one prefill worker", 1, 3, (Flow(10, *SHORT), Flow(5, 8000, 150))),
    Workload("mixed, one prefill worker, too many", 1, 3, (Flow(20, *SHORT), Flow(12, 8000, 150))),
    Workload("mixed, one decode worker", 3, 1, (Flow(10, *SHORT), Flow(5, 8000, 150))),
    Workload("conversations", 2, 2),
)


def _arrivals(flow: Flow, number: int, seconds: float) -> Iterator[TraceRequest]:
    chance = random.Random(number)
    at, content = 0.0, number * 100_000_000
    while (at := at + chance.expovariate(flow.rate)) < seconds:
        prompt = max(flow.shortest, int(chance.expovariate(1 / flow.prompt)))
        output = max(1, int(chance.expovariate(1 / flow.output)))
        keys = tuple(made_key(content + n) for n in range(prompt // BLOCK))
        content += len(keys)
        yield TraceRequest(at, prompt, output, keys)

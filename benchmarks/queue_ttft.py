"""What the prefill queue adds to the time to first token, against sending the prefill leg to the worker directly.

Two routers, one for each way, share a store and mock workers. They are asked in turn, a new prompt each time, so that
whatever else the machine does meets both; the difference is taken pair by pair. The CPU time beside it is of everybody
who has to do with a prefill leg; on a machine that is busy it says more than the clock.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import uvloop

from benchmarks.common import cpu_seconds, percentile, progress
from benchmarks.load import LoadError, run_load
from benchmarks.mock_cluster import MockCluster, MockRouter, new_prompt

TOKENS = 512
SPEED = "100"
"""The modelled engine's times are small beside what is measured."""
WAYS = ("queue", "direct")
LEAST_PART = 0.8
"""A store that does not answer within tens of milliseconds, as on a machine that is busy, is passed by."""
WARM_UP = 20


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is asked."""

    pairs: int
    """One request after the other."""
    rounds: int
    """With several connections at a time, in turn over both ways."""
    requests: int
    """In each of these rounds."""
    connections: int = 8


@dataclass(slots=True)
class _Load:
    """What was measured of one way under one load."""

    router: MockRouter
    others: tuple[int, ...]
    """Processes beside the router: the store and the prefill worker."""
    seconds: list[float] = field(default_factory=list)
    """To the first token of each request."""
    router_cpu: float = 0.0
    others_cpu: float = 0.0

    def ask(self, chance: random.Random, requests: int, connections: int) -> None:
        """Ask for new prompts, over so many connections at a time."""
        bodies = [new_prompt(chance, TOKENS) for _ in range(requests)]
        router, others = self._cpu()
        found = uvloop.run(run_load(self.router.port, bodies, requests=requests, connections=connections)).first_byte
        now = self._cpu()
        self.router_cpu += now[0] - router
        self.others_cpu += now[1] - others
        if len(found) != requests:
            raise LoadError(f"{requests - len(found)} requests had no first byte")
        self.seconds += found

    def _cpu(self) -> tuple[float, float]:
        return cpu_seconds(self.router.pid), sum(map(cpu_seconds, self.others))


def measure(plan: Plan) -> tuple[list[dict[str, Any]], float]:
    """A row for each way and load, and the median of what the queue adds to one request alone, milliseconds.

    Raises:
        ProcessError, LoadError: something did not start or answer.
        RuntimeError: a router did not do as it was told.
    """
    chance = random.Random(4)
    with MockCluster() as cluster:
        prefill = cluster.worker("prefill", "--speed", SPEED).process
        cluster.worker("decode", "--speed", SPEED)
        others = (cluster.store.pid, prefill.pid)
        routers = {way: cluster.router("--disagg", "always", "--prefill-dispatch", way) for way in WAYS}
        for router in routers.values():
            # One that has just started may not know its queue yet, and has no connections.
            for _ in range(WARM_UP):
                _Load(router, others).ask(chance, 1, 1)
        before = {way: router.dispatched(way) for way, router in routers.items()}
        progress(f"TTFT: {plan.pairs} pairs, one request at a time")
        alone = {way: _Load(router, others) for way, router in routers.items()}
        for n in range(plan.pairs):
            # Each goes first as often as the other.
            for way in WAYS if n % 2 else reversed(WAYS):
                alone[way].ask(chance, 1, 1)
        progress(f"TTFT: {plan.rounds} rounds over {plan.connections} connections")
        together = {way: _Load(router, others) for way, router in routers.items()}
        for _ in range(plan.rounds):
            for way in WAYS:
                together[way].ask(chance, plan.requests, plan.connections)
        asked = plan.pairs + plan.rounds * plan.requests
        went = {way: (router.dispatched(way) - before[way]) / asked for way, router in routers.items()}
        if min(went.values()) < LEAST_PART:
            raise RuntimeError(f"too few prefill legs went the way they should: {went}")
    rows = [*_rows(1, alone, went), *_rows(plan.connections, together, went)]
    pairs = zip(alone["queue"].seconds, alone["direct"].seconds, strict=True)
    return rows, statistics.median(queued - direct for queued, direct in pairs) * 1e3


def _rows(connections: int, loads: Mapping[str, _Load], went: Mapping[str, float]) -> list[dict[str, Any]]:
    return [
        {
            "dispatch": way,
            "connections": connections,
            "requests": len(load.seconds),
            "TTFT p50 ms": percentile(load.seconds, 50) * 1e3,
            "TTFT p99 ms": percentile(load.seconds, 99) * 1e3,
            "router CPU us": load.router_cpu / len(load.seconds) * 1e6,
            "store and worker CPU us": load.others_cpu / len(load.seconds) * 1e6,
            "legs that went so": went[way],
        }
        for way, load in loads.items()
    ]

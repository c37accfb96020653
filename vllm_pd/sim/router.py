"""The router of a simulated cluster: it knows what a real one would be told, and chooses with the same functions."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm_pd.block_hash import BlockKey
from vllm_pd.routing.model import NO_OVERLAP, Rates
from vllm_pd.routing.prefix_index import PrefixIndex
from vllm_pd.sim.engine import EngineConfig
from vllm_pd.sim.trace import TraceRequest
from vllm_pd.state.base import Role, WorkerId
from vllm_pd.state.block_index import Holder


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes: indexes of workers."""

    worker: int
    prefiller: int | None = None


class SimRouter:
    def __init__(
        self, policy: str, roles: Sequence[Role], engine: EngineConfig, *, seed: int, temperature: float
    ) -> None:
        self.policy = policy
        self.size = engine.block_size
        self.roles = roles
        self.index = PrefixIndex()
        self.holders = [Holder(WorkerId(f"w{i}")) for i in range(len(roles))]
        for h in self.holders:
            self.index.add(h)
        self.rates = Rates()
        self.free_at = [0.0] * len(roles)
        self.inflight = [0] * len(roles)
        self.where: dict[int, Placement] = {}
        self.random = random.Random(seed)
        self.turn = 0

    def place(self, token: int, request: TraceRequest, now: float) -> Placement:
        self.turn += 1
        n = len(self.roles)
        ov = self.index.lookup(request.keys)
        cost = []
        for i, h in enumerate(self.holders):
            o = ov.get(h, NO_OVERLAP)
            u = request.prompt - o.blocks * self.size
            own = self.rates.prefill_base + u * self.rates.prefill_token + u * u / 2 * self.rates.prefill_square
            if self.policy == "round-robin":
                s = (i - self.turn) % n
            elif self.policy == "least-loaded":
                s = self.inflight[i]
            else:
                s = max(0, self.free_at[i] - now) + 2 * own
            cost.append((s, self.random.random(), i, own))
        _, _, i, own = min(cost)
        self.free_at[i] = max(self.free_at[i], now) + own
        self.inflight[i] += 1
        self.where[token] = p = Placement(i)
        return p

    def first_token(self, token: int, now: float) -> None: ...
    def prefilled(self, token: int, now: float) -> None: ...
    def finish(self, token: int, now: float) -> None:
        self.inflight[self.where.pop(token).worker] -= 1

    def apply(self, worker: int, changed: Mapping[BlockKey, int]) -> None:
        packed: dict[int, list[bytes]] = {}
        for key, bits in changed.items():
            packed.setdefault(bits, []).append(key)
        self.index.apply(self.holders[worker], {bits: b"".join(keys) for bits, keys in packed.items()})

    def report(self, worker: int, running: int, waiting: int, kv_usage: float, now: float) -> None: ...

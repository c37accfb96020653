"""The router of a simulated cluster: it knows what a real one would be told, and chooses with the same functions."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm_pd.block_hash import BlockKey
from vllm_pd.routing import policies
from vllm_pd.routing.ledger import EngineLedger
from vllm_pd.routing.model import Ask, Choice
from vllm_pd.routing.plan import plan
from vllm_pd.routing.policies.base import Policy
from vllm_pd.routing.prefix_index import PrefixIndex
from vllm_pd.routing.rates import RateLearner
from vllm_pd.routing.split_rule import DEFAULT_RULE, SplitRule
from vllm_pd.sim.trace import TraceRequest
from vllm_pd.sim.work import EngineConfig
from vllm_pd.state.base import PoolId, Role, WorkerId
from vllm_pd.state.block_index import Holder

_POOL = PoolId("simulated")


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes: indexes of workers."""

    worker: int
    prefiller: int | None = None
    turn: float = 0.0
    """The priority of the prompt's computation."""


class SimRouter:
    """One router over workers of one pool. Requests are named by numbers, workers by their index."""

    def __init__(
        self,
        policy: str | Policy,
        roles: Sequence[Role],
        engine: EngineConfig,
        *,
        rule: SplitRule = DEFAULT_RULE,
        seed: int = 0,
        temperature: float = 0.0,
    ) -> None:
        """`policy` is a policy or the name of one. Raises SettingsError for an unknown name."""
        self._rule = rule
        self._policy = policies.policy(policy) if isinstance(policy, str) else policy
        self._block_size = engine.block_size
        self._temperature = temperature
        self._random = random.Random(seed)
        self._index = PrefixIndex()
        learner = RateLearner()
        self._ledgers = [
            EngineLedger(Holder(WorkerId(f"{role}-{i}")), _POOL, role, engine.gpu_blocks, learner)
            for i, role in enumerate(roles)
        ]
        for ledger in self._ledgers:
            ledger.ordered = engine.scheduling_policy == "priority"
            self._index.add(ledger.holder)
        self._decoders = [i for i, role in enumerate(roles) if role.decodes]
        self._prefillers = [i for i, role in enumerate(roles) if role is Role.PREFILL]
        self._placed: dict[int, tuple[Placement, int]] = {}
        """Requests in progress: where, and how many tokens the answer will have."""
        self._picks = 0

    def place(self, token: int, request: TraceRequest, now: float) -> Placement:
        """Choose, and count the request as sent."""
        ask = Ask(request.prompt, self._block_size, keys=request.keys)
        overlaps = self._index.lookup(request.keys)
        made = plan(
            self._policy,
            ask,
            [self._ledgers[i] for i in self._decoders],
            [self._ledgers[i] for i in self._prefillers],
            overlaps,
            now,
            rule=self._rule,
            temperature=self._temperature,
            random=self._random,
        )
        worker, prefiller = self._decoders[made.decode.chosen], None
        turn = self._begin(worker, made.decode, token, ask, now, remote=made.remote)
        if made.prefill is not None:
            prefiller = self._prefillers[made.prefill.chosen]
            turn = self._begin(prefiller, made.prefill, token, ask, now)
        placement = Placement(worker, prefiller, turn)
        self._placed[token] = placement, request.output
        return placement

    def _begin(self, worker: int, choice: Choice, token: int, ask: Ask, now: float, *, remote: bool = False) -> float:
        self._picks += 1
        return self._ledgers[worker].begin(
            token, ask, choice.best.overlap, now, remote=remote, pick=self._picks, patience=choice.patience
        )

    def prefilled(self, token: int, now: float) -> None:
        """The prefill worker has answered; the request is sent on."""
        placement, _ = self._placed[token]
        assert placement.prefiller is not None
        prefiller = self._ledgers[placement.prefiller]
        prefiller.first_token(token, now)
        prefiller.finish(token, now)
        self._ledgers[placement.worker].prefilled(token, now)

    def first_token(self, token: int, now: float) -> None:
        """The first token of an answer came."""
        self._ledgers[self._placed[token][0].worker].first_token(token, now)

    def finish(self, token: int, now: float) -> None:
        """An answer ended."""
        placement, output = self._placed.pop(token)
        self._ledgers[placement.worker].finish(token, now, output)

    def apply(self, worker: int, changed: Mapping[BlockKey, int]) -> None:
        """A worker's cache changed: key -> tier bits."""
        packed: dict[int, list[BlockKey]] = {}
        for key, bits in changed.items():
            packed.setdefault(bits, []).append(key)
        self._index.apply(self._ledgers[worker].holder, {bits: b"".join(keys) for bits, keys in packed.items()})

    def report(self, worker: int, running: int, waiting: int, kv_usage: float, now: float) -> None:
        """A worker's load report arrived."""
        self._ledgers[worker].report(running, waiting, kv_usage, now)

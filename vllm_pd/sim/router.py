"""The router of a simulated cluster: it knows what a real one would be told, and chooses with the same functions.

Workers may come, go and change what work they are given; one that went keeps its index.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from vllm_pd.block_hash import BlockKey
from vllm_pd.routing import policies
from vllm_pd.routing.choose import choose
from vllm_pd.routing.ledger import EngineLedger
from vllm_pd.routing.model import Ask, Choice, Rates
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
    uncached: int = 0
    """Prompt tokens that are expected to be computed."""


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
        both_hand_over: bool = False,
    ) -> None:
        """Args:
        policy: one, or its name.
        both_hand_over: workers that do both prefill for others too, as a real router has them do.

        Raises:
            SettingsError: an unknown name.
        """
        self._rule = rule
        self._policy = policies.policy(policy) if isinstance(policy, str) else policy
        self._block_size = engine.block_size
        self._temperature = temperature
        self._random = random.Random(seed)
        self._index = PrefixIndex()
        self._engine = engine
        self._both_hand_over = both_hand_over
        self._learner = RateLearner()
        self._prior = self._learner.rates
        self._ledgers: list[EngineLedger] = []
        self._given: dict[int, Role] = {}
        """The role whose new work each worker gets; without those that get none."""
        self._decoders: list[int] = []
        self._prefillers: list[int] = []
        for role in roles:
            self.add(role)
        self._placed: dict[int, tuple[Placement, int]] = {}
        """Requests in progress: where, and how many tokens the answer will have."""
        self._picks = 0

    # Workers.

    @property
    def has_decoders(self) -> bool:
        """Whether a request can be placed at all."""
        return bool(self._decoders)

    @property
    def rates(self) -> Rates | None:
        """Of the usual worker, as learned; None before anything was."""
        return self._learner.rates if self._learner.rates is not self._prior else None

    def add(self, role: Role) -> int:
        """A worker came up, with an empty cache. Returns its index, the next one."""
        index = len(self._ledgers)
        holder = Holder(WorkerId(f"{role}-{index}"))
        ledger = EngineLedger(holder, _POOL, role, self._engine.gpu_blocks, self._learner)
        ledger.ordered = self._engine.scheduling_policy == "priority"
        self._ledgers.append(ledger)
        self._index.add(holder)
        self.give(index, role)
        return index

    def give(self, worker: int, role: Role | None) -> None:
        """From now on the worker gets the new work of this role; None: no new work."""
        if role is None:
            self._given.pop(worker, None)
        else:
            self._given[worker] = self._ledgers[worker].role = role
        given = self._given
        # Where all do both, none is there to keep prompts off the others.
        both = self._both_hand_over and any(each is not Role.BOTH for each in given.values())
        self._decoders = [i for i in sorted(given) if given[i].decodes]
        self._prefillers = [i for i in sorted(given) if given[i] is Role.PREFILL or (both and given[i] is Role.BOTH)]

    def decodes(self, worker: int) -> bool:
        """Whether it gets new decode work."""
        return worker in self._decoders

    def remove(self, worker: int) -> None:
        """The worker is gone; what it held is forgotten."""
        self.give(worker, None)
        self._index.remove(self._ledgers[worker].holder)

    # Requests.

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
        uncached = (made.prefill or made.decode).best.uncached
        placement = Placement(worker, prefiller, turn, uncached)
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

    def redirect(self, token: int, request: TraceRequest, now: float) -> Placement | None:
        """The prompt is computed, and another worker than was thought is to decode: the one that was gets no new work.

        None, and nothing is changed, where there is no other. To be called before `prefilled`.
        """
        before, output = self._placed[token]
        among = [i for i in self._decoders if i != before.prefiller]
        if not among:
            return None
        self._ledgers[before.worker].finish(token, now)
        ask = Ask(request.prompt, self._block_size, keys=request.keys)
        overlaps = self._index.lookup(request.keys)
        choice = choose(self._policy, ask, [self._ledgers[i] for i in among], overlaps, now)
        worker = among[choice.chosen]
        self._begin(worker, choice, token, ask, now, remote=True)
        placement = replace(before, worker=worker)
        self._placed[token] = placement, output
        return placement

    def withdraw(self, token: int, now: float) -> None:
        """A request is taken from its workers without an end."""
        placement, _ = self._placed.pop(token)
        self._ledgers[placement.worker].finish(token, now)
        if placement.prefiller is not None:
            self._ledgers[placement.prefiller].finish(token, now)

    def finish(self, token: int, now: float) -> None:
        """An answer ended."""
        placement, output = self._placed.pop(token)
        self._ledgers[placement.worker].finish(token, now, output)

    def apply(self, worker: int, changed: Mapping[BlockKey, int]) -> None:
        """A worker's cache changed: key -> tier bits. Ignored of one that is gone."""
        if self._ledgers[worker].holder not in self._index:
            return
        packed: dict[int, list[BlockKey]] = {}
        for key, bits in changed.items():
            packed.setdefault(bits, []).append(key)
        self._index.apply(self._ledgers[worker].holder, {bits: b"".join(keys) for bits, keys in packed.items()})

    def report(self, worker: int, running: int, waiting: int, kv_usage: float, now: float) -> None:
        """A worker's load report arrived."""
        self._ledgers[worker].report(running, waiting, kv_usage, now)

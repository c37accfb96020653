"""Where a request goes: what each cache holds of its prompt, how busy the engines are, and the choice among them.

The choice itself is `routing.decide`, a pure function; here its inputs come together. Synchronous: between looking at
the engines' ledgers and counting a request there nothing else happens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from random import Random

from vllm_pd.router.announcements import Announcements
from vllm_pd.router.attempt import Attempt, Placed
from vllm_pd.router.decision import Reason
from vllm_pd.router.demand import Demand
from vllm_pd.router.index_watch import IndexWatch
from vllm_pd.router.metrics import RouterMetrics
from vllm_pd.router.sessions import Sessions
from vllm_pd.router.settings import RouterSettings
from vllm_pd.router.worker import Worker
from vllm_pd.routing import policies
from vllm_pd.routing.decide import Decision, PoolAsk, decide
from vllm_pd.routing.ledger import EngineLedger
from vllm_pd.routing.model import Ask, Choice, Overlaps
from vllm_pd.routing.plan import Plan
from vllm_pd.routing.record import DecisionRecord, record_of
from vllm_pd.routing.split_rule import Disagg, SplitRule
from vllm_pd.state.base import PoolId, Role, WorkerId

_REASONS = {
    "no prefill worker": Reason.NO_PREFILL,
    "never": Reason.NEVER,
    "prefill busy": Reason.PREFILL_BUSY,
    "sooner whole": Reason.SOONER_WHOLE,
    "split": Reason.SPLIT,
}

_NO_SPLIT, _TRY = SplitRule(Disagg.NEVER), SplitRule(Disagg.ALWAYS)
TRY_EVERY = 128


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes."""

    decode: Placed
    prefill: Placed | None
    reason: Reason
    ttft: float
    """Predicted seconds to the first token."""
    record: DecisionRecord | None
    """Where an explanation was asked for."""


class Placer:
    """Chooses engines for requests. Belongs to one event loop.

    Args:
        index: mirrors of the block index, and
        announcements: the proof that they fit; None where the router keeps no index.
        clock: monotonic seconds, the directory's.
    """

    def __init__(
        self,
        settings: RouterSettings,
        metrics: RouterMetrics,
        *,
        index: IndexWatch | None = None,
        announcements: Announcements | None = None,
        clock: Callable[[], float],
    ) -> None:
        self._random = Random(settings.seed if settings.seed >= 0 else None)
        self._orders = policies.policy(settings.policy, settings.weights).patience > 0
        """Else all keep the order of arrival, those with another policy by a header too."""
        self._strict = settings.require_prefill
        self._sessions = Sessions(settings.session_ttl)
        self._metrics = metrics
        self._index = index
        self._announcements = announcements
        self._clock = clock
        self._picks = 0
        self._not_handed_over = 0
        """Requests in a row that went whole because of what a hand-over is believed to take."""

    def place(
        self,
        demand: Demand,
        workers: Sequence[Worker],
        *,
        split: bool,
        exclude: Collection[WorkerId] = (),
        sends: bool = True,
    ) -> Placement | None:
        """The best placement now; None when nothing is left that decodes.

        Args:
            split: whether another worker may prefill, as far as the caller is concerned.
            exclude: workers that are not to be asked.
            sends: whether the request is really sent. If not, nothing is learned from it.
        """
        began, now = time.perf_counter(), self._clock()
        usable = [worker for worker in workers if worker.id not in exclude] if exclude else workers
        asks = self._asks(demand, usable, split=split and demand.forbidden is None, now=now)
        if not asks:
            return None
        seed = self._random.getrandbits(48) if demand.temperature > 0 else None
        # Where all workers do both, none is there to keep prompts off the others: a hand-over would save nothing.
        both = Role.BOTH
        equals = len(usable) > 1 and all(worker.role is both for worker in usable)
        rule = _NO_SPLIT if equals else demand.rule
        decision = _decide(demand, asks, rule, seed, now)
        if sends and decision.plan.weighed is not None and self._worth_a_try(decision.plan):
            rule = _TRY
            decision = _decide(demand, asks, rule, seed, now)
        placement = self._placement(demand, usable, asks, decision, rule, seed, now)
        self._metrics.scheduling_seconds.observe(time.perf_counter() - began)
        return placement

    def _worth_a_try(self, plan: Plan) -> bool:
        """Whether a request is split although the rule `auto` says no: how long a hand-over takes is learned from
        hand-overs only, so an estimate that is too high would stay for ever."""
        weighed = plan.weighed
        if plan.remote:
            self._not_handed_over = 0
        elif weighed is not None and weighed.there - weighed.transfer <= weighed.here:
            # It is the hand-over that decides.
            self._not_handed_over += 1
            if self._not_handed_over >= TRY_EVERY:
                self._not_handed_over = 0
                return True
        return False

    def _asks(self, demand: Demand, workers: Sequence[Worker], *, split: bool, now: float) -> list[PoolAsk]:
        pools: dict[PoolId, tuple[list[EngineLedger], list[EngineLedger]]] = {}
        leaving: list[Worker] = []
        pool: PoolId | None = None
        for worker in workers:
            # Mostly all are of one pool.
            if worker.pool != pool:
                pool = worker.pool
                decoders, prefillers = pools.setdefault(pool, ([], []))
            for engine in worker.engines:
                if now >= engine.silent_until:
                    engine.advance(now)
            if worker.decodes:
                decoders += worker.engines
            elif worker.role.decodes:
                leaving.append(worker)
            if split:
                if worker.hands_over:
                    prefillers += worker.engines
                elif self._strict and worker.can_hand_over:
                    leaving.append(worker)
        if leaving:
            _last_resort(pools, leaving, split=split and self._strict)
        session = self._sessions.worker(demand.session, now) if demand.session else None
        return [
            self._ask(demand, pool, decoders, prefillers, workers, session)
            for pool, (decoders, prefillers) in pools.items()
            if decoders
        ]

    def _ask(
        self,
        demand: Demand,
        pool: PoolId,
        decoders: Sequence[EngineLedger],
        prefillers: Sequence[EngineLedger],
        workers: Sequence[Worker],
        session: WorkerId | None,
    ) -> PoolAsk:
        prompt = demand.prompt(pool)
        record = next(worker.record for worker in workers if worker.pool == pool)
        mirror = self._index.mirror(pool) if self._index is not None else None
        known = not prompt.why_unknown
        overlaps: Overlaps = {}
        if known and mirror is not None:
            began = time.perf_counter()
            overlaps = mirror.prefixes.lookup(prompt.keys)
            self._metrics.lookup_seconds.observe(time.perf_counter() - began)
            if overlaps and self._announcements is not None:
                for holder in overlaps:
                    self._announcements.proven(holder)
        ask = Ask(
            prompt.tokens,
            record.pool.block_size,
            demand.expected_output,
            exact=known,
            keys=prompt.keys,
            session=session,
        )
        age = mirror.age() if mirror is not None else None
        return PoolAsk(pool, ask, decoders, prefillers, overlaps, len(prompt.keys), prompt.why_unknown, age)

    def _placement(
        self,
        demand: Demand,
        workers: Sequence[Worker],
        asks: Sequence[PoolAsk],
        decision: Decision,
        rule: SplitRule,
        seed: int | None,
        now: float,
    ) -> Placement:
        made, ask = decision.plan, asks[decision.pool]
        decode = _placed(demand, workers, ask, made.decode)
        prefill: Placed | None = None
        if made.prefill is not None:
            prefill = _placed(demand, workers, ask, made.prefill, _lead(ask, made.prefill))
        reason = demand.forbidden or _REASONS.get(made.reason)
        if reason is Reason.NEVER and rule is _NO_SPLIT:
            reason = Reason.EQUALS
        if reason is None:
            short = ask.ask.tokens < ask.ask.block_size
            reason = Reason.SHORT if short else Reason.CACHED
        if prefill is not None and not decode.worker.record.can_transfer:
            prefill, reason = None, Reason.NO_TRANSFER
        elif reason is Reason.NO_PREFILL and any(
            worker.role.prefills and not worker.record.can_transfer and worker.pool == ask.pool
            for worker in workers
            if worker is not decode.worker
        ):
            reason = Reason.NO_TRANSFER
        record = None
        if demand.explain:
            record = record_of(
                asks,
                decision,
                request=demand.request,
                path=demand.path,
                model=demand.model,
                policy=demand.policy,
                temperature=demand.temperature,
                seed=seed,
                rule=rule,
                forbidden=demand.forbidden or "",
                reason=reason,
                now=now,
            )
        return Placement(decode, prefill, reason, made.ttft, record)

    # What comes of it.

    def begin(self, placed: Placed, *, remote: bool = False, silent: bool = False) -> Attempt:
        """Count a leg of a request on its engine, at once. See `EngineLedger.begin`."""
        self._picks += 1
        announcements, holder = self._announcements, placed.engine.holder
        announced = None
        if (
            announcements is not None
            and not remote
            and placed.prompt.keys
            and not placed.choice.best.overlap.blocks
            and announcements.wants(holder)
        ):
            announced = announcements.seq(holder)
        return Attempt(
            placed,
            self._picks,
            self._clock,
            remote=remote,
            silent=silent,
            orders=self._orders,
            announced=announced,
        )

    def note_session(self, demand: Demand, worker: Worker) -> None:
        """The request's session is served by `worker`."""
        if demand.session:
            self._sessions.note(demand.session, worker.id, self._clock())

    def computed(self, attempt: Attempt) -> None:
        """The engine has computed the prompt just now: its blocks should be announced."""
        announcements, placed = self._announcements, attempt.placed
        if announcements is None or attempt.announced is None or not announcements.wants(placed.engine.holder):
            return
        announcements.sent(placed.engine.holder, placed.prompt.keys, attempt.announced)


def _last_resort(
    pools: dict[PoolId, tuple[list[EngineLedger], list[EngineLedger]]], leaving: Sequence[Worker], *, split: bool
) -> None:
    """Where nobody else could serve the request at all, those on their way to another role do it.

    Args:
        split: whether a prompt that nobody prefills is refused.
    """
    decodes = any(decoders for decoders, _ in pools.values())
    prefills = {pool for pool, (_, prefillers) in pools.items() if prefillers}
    for worker in dict.fromkeys(leaving):
        decoders, prefillers = pools[worker.pool]
        if not decodes and worker.role.decodes:
            decoders += worker.engines
        if split and worker.pool not in prefills and worker.can_hand_over:
            prefillers += worker.engines


def _lead(ask: PoolAsk, choice: Choice) -> int:
    """See `Placed.lead`."""
    best, overlaps = choice.best, ask.overlaps
    others = (
        overlaps[each.holder].blocks
        for each in ask.prefillers
        if each.holder in overlaps and each.holder != best.holder
    )
    return best.overlap.blocks + best.promised - max(others, default=0)


def _decide(demand: Demand, asks: Sequence[PoolAsk], rule: SplitRule, seed: int | None, now: float) -> Decision:
    return decide(
        demand.policy,
        asks,
        now,
        rule=rule,
        temperature=demand.temperature,
        random=Random(seed) if seed is not None else None,
        explain=demand.explain,
    )


def _placed(demand: Demand, workers: Sequence[Worker], ask: PoolAsk, choice: Choice, lead: int = 0) -> Placed:
    holder = choice.best.holder
    worker = next(worker for worker in workers if worker.id == holder.worker)
    return Placed(worker, worker.engines[holder.rank], ask.ask, demand.prompt(ask.pool), choice, lead)

"""What one router knows of one engine's work: its own requests at once, everybody else's by report."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import inf

from vllm_pd.block_hash import BlockKey
from vllm_pd.routing.begun_request import BegunRequest
from vllm_pd.routing.model import NO_OVERLAP, Ask, Overlap, Rates
from vllm_pd.routing.others_work import OthersWork
from vllm_pd.routing.predict import cached_tokens, turn, wait
from vllm_pd.routing.rates import PrefillWork, RateLearner, Speed, together
from vllm_pd.state.base import PoolId, Role
from vllm_pd.state.block_index import Holder

_OVERDUE = 0.1
"""Part of its predicted time that the request being prefilled is expected to need yet, however long it took already."""
_TOGETHER = 8
"""Requests in a row that are one observation: steps are shared, so who took which part of the time is not known."""
_MEAN_KEEPS = 0.95
_TYPICAL_TOKENS = 1000
"""Uncached tokens of a request of which nothing is known."""


class EngineLedger:
    """One engine as a `Candidate`. Times are the caller's monotonic seconds and never go back.

    Prefill work is a queue, served in the order of arrival or, by an `ordered` engine, of turns: what is predicted to
    be left of it shrinks as time passes and is corrected with every first token. The end of a request that is unknown
    is ignored, because requests end in several ways at once. A silent request leaves the queue when a later one has
    its first token, or when its own predicted time is over (`advance`).
    """

    __slots__ = (
        "__weakref__",
        "_busy_since",
        "_decoding",
        "_done",
        "_done_seconds",
        "_inflight_at_report",
        "_mean_seconds",
        "_most_inflight",
        "_others",
        "_own_seconds",
        "_own_tokens",
        "_queue",
        "_remote",
        "_reported_running",
        "_speed",
        "active_blocks",
        "begun",
        "begun_blocks",
        "decoding",
        "free_at",
        "holder",
        "inflight",
        "kv_blocks",
        "kv_usage",
        "last_pick",
        "least_wait",
        "ordered",
        "pool",
        "prefill_tokens",
        "promised",
        "rates",
        "role",
        "running",
        "silent_until",
        "turns",
        "waiting",
    )

    def __init__(
        self, holder: Holder, pool: PoolId, role: Role, kv_blocks: int = 0, learner: RateLearner | None = None
    ) -> None:
        """Args:
        kv_blocks: its capacity; 0 when unknown.
        learner: shared by the engines of a pool, which mostly are alike.
        """
        self.holder = holder
        self.pool = pool
        self.role = role
        self.kv_blocks = kv_blocks
        learner = learner or RateLearner()
        learner.follow(self)
        self._speed = Speed(learner)
        self.rates: Rates = self._speed.rates
        self._queue: dict[Hashable, BegunRequest] = {}
        """Being prefilled here or waiting for it, in the order of their turns; what is computed already is first."""
        self._remote: dict[Hashable, BegunRequest] = {}
        """Prefilled elsewhere, without a first token."""
        self._decoding: dict[Hashable, BegunRequest] = {}
        self._busy_since = 0.0
        """Since when the oldest of the queue is served: its dispatch, or the first token before it."""
        self._done: PrefillWork | None = None
        """What was computed since the queue was empty, or since the last observation, and how long it took."""
        self._done_seconds = 0.0
        self._own_tokens = 0
        self._own_seconds = 0.0
        self._mean_seconds = self.rates.prefill(_TYPICAL_TOKENS, 0)
        self._others = OthersWork()
        self._reported_running = 0
        self._inflight_at_report = 0
        self._most_inflight = 0
        """Since the newest report: no more of those that the next one counts are this router's."""
        self.ordered = False
        """Whether the engine computes requests in the order of their turns; else it takes them as they come."""
        self.turns: Sequence[tuple[float, float]] = ()
        self.promised: dict[BlockKey, BegunRequest] = {}
        """Blocks that requests in the queue will leave in the cache."""
        self.free_at = 0.0
        self.least_wait = 0.0
        self.prefill_tokens = 0
        self.running = 0
        self.waiting = 0
        self.kv_usage = 0.0
        self.decoding = 0
        self.active_blocks = 0
        self.begun = 0
        self.begun_blocks = 0
        self.inflight = 0
        self.last_pick = 0
        self.silent_until = inf
        """When `advance` has something to do."""

    def rates_changed(self) -> None:
        """The pool's learner has new rates."""
        self.rates = self._speed.rates

    def promised_after(self, held: int, ask: Ask) -> int:
        """Blocks of the prompt after the first `held` that requests in the queue compute.

        A block's key depends on all blocks before it, so they are a run, and its end is found by halving.
        """
        keys, promised = ask.keys, self.promised
        if not promised or held >= len(keys) or keys[held] not in promised:
            return 0
        low, high = held + 1, len(keys)
        while low < high:
            middle = (low + high) // 2
            if keys[middle] in promised:
                low = middle + 1
            else:
                high = middle
        return low - held

    def prefill_queue(self, now: float) -> float:
        """Predicted seconds until the prefill work that is there is done."""
        return wait(self, now)

    @property
    def own_prefill_tokens(self) -> int:
        """Uncached prompt tokens of `queued`; what other routers are to be told."""
        return self._own_tokens

    @property
    def queued(self) -> int:
        """This router's requests that this engine prefills and that have no first token yet."""
        return len(self._queue)

    def begin(
        self,
        request: Hashable,
        ask: Ask,
        overlap: Overlap,
        now: float,
        *,
        remote: bool = False,
        silent: bool = False,
        pick: int = 0,
        patience: float = 0.0,
    ) -> float:
        """A request is placed here. `remote`: another worker prefills it, so it adds no prefill work here. `silent`:
        its first token will not be seen.

        `pick` grows with every choice of the router. `patience`: the request lets those go before it that come later
        by up to so many times its own work, if the engine is `ordered`. Returns its turn, a time on the same clock,
        which the engine has to be told. Raises `ValueError` for a name that is in progress here.
        """
        if request in self._queue or request in self._remote or request in self._decoding:
            raise ValueError(f"Request {request!r} is on {self.holder} already; give every attempt a name of its own")
        if now >= self.silent_until:
            self.advance(now)
        if not ask.exact:
            overlap = NO_OVERLAP
        held = overlap.blocks
        held += self.promised_after(held, ask)
        entry = BegunRequest(ask, overlap, cached_tokens(ask, held), silent, now)
        if remote:
            self._remote[request] = entry
        else:
            rates = self.rates
            entry.seconds = rates.prefill(entry.new, entry.cached) + rates.load(overlap)
            if self.ordered:
                entry.turn = self._turn(ask, held, turn(now, patience, entry.seconds))
            if ask.exact:
                entry.promises = ask.keys[held:]
                self.promised.update(dict.fromkeys(entry.promises, entry))
            self._mean_seconds = _MEAN_KEEPS * self._mean_seconds + (1 - _MEAN_KEEPS) * entry.seconds
            if not self._queue:
                self._busy_since = now
            self._enqueue(request, entry)
            self._own_tokens += entry.new
            self._own_seconds += entry.seconds
        self.active_blocks += entry.blocks
        self.inflight += 1
        self._most_inflight = max(self._most_inflight, self.inflight)
        self.begun += 1
        self.begun_blocks += entry.blocks
        if pick:
            self.last_pick = pick
        self._refresh(now)
        return entry.turn

    def _turn(self, ask: Ask, held: int, own: float) -> float:
        """Not before the request that computes the last of its blocks that are promised."""
        first = self.promised.get(ask.keys[held - 1]) if 0 < held <= len(ask.keys) else None
        return max(own, first.turn) if first is not None else own

    def _enqueue(self, request: Hashable, entry: BegunRequest) -> None:
        queue = self._queue
        before = next(reversed(queue.values()), None)
        queue[request] = entry
        if before is not None and entry.turn < before.turn:
            (head, computed), *waiting = queue.items()
            waiting.sort(key=lambda item: item[1].turn)
            self._queue = {head: computed, **dict(waiting)}

    def prefilled(self, request: Hashable, now: float) -> None:
        """The remote prefill of a request is done and the request is sent here. Ignored for others."""
        entry = self._remote.get(request)
        if entry is not None:
            entry.since = now
            entry.crowded = self._lacks_room(entry)

    def _lacks_room(self, entry: BegunRequest) -> bool:
        """Whether a request that comes now waits until others end."""
        coming = sum(other.missing for other in self._remote.values() if other.crowded is not None)
        return bool(self.kv_blocks) and self.kv_usage * self.kv_blocks + coming + entry.missing > self.kv_blocks

    def first_token(self, request: Hashable, now: float, took: float | None = None) -> None:
        """The first byte of its answer came. Ignored for a name that is unknown or had its first token.

        `took`: seconds since the engine got the request, where that was later than it was counted here.
        """
        entry = self._remote.pop(request, None)
        if entry is not None:
            # The wait for room is none of the hand-over's time. Counted as such, it made hand-overs look dear for good:
            # decode workers then computed all prompts themselves, and nothing corrected it.
            if not entry.crowded:
                self._speed.observe_transfer(entry.missing, now - entry.since)
        else:
            if request not in self._queue:
                return
            if took is not None:
                self._busy_since = max(self._busy_since, now - took)
            self._overtake(request, now)
            entry = self._leave_queue(request, now, computed=True)
            assert entry is not None
        self._decodes(request, entry, now)
        self._refresh(now)

    def advance(self, now: float) -> None:
        """Take silent requests out of the queue whose predicted time is over."""
        while self._queue:
            request, head = next(iter(self._queue.items()))
            ends = self._busy_since + head.seconds
            if not head.silent or now < ends:
                break
            self._leave_queue(request, ends, computed=False)
            self._decodes(request, head, ends)
        self._refresh(now)

    def _overtake(self, request: Hashable, now: float) -> None:
        """A request has its first token, so silent ones before it have theirs: the engine serves them in turn."""
        before: list[tuple[Hashable, BegunRequest]] = []
        for name, entry in self._queue.items():
            if name == request:
                break
            if entry.silent:
                before.append((name, entry))
        since = self._busy_since
        for name, entry in before:
            self._leave_queue(name, now, computed=False)
            # The time until now covers both.
            self._queue[request].work = together(self._queue[request].work, entry.work)
            self._decodes(name, entry, now)
        self._busy_since = since

    def _decodes(self, request: Hashable, entry: BegunRequest, now: float) -> None:
        entry.since = now
        self._decoding[request] = entry
        self.decoding += 1

    def finish(self, request: Hashable, now: float, output_tokens: int = 0) -> None:
        """It ended, in whatever way. `output_tokens` of its answer where known. Ignored for an unknown name."""
        entry = self._decoding.pop(request, None)
        if entry is not None:
            if output_tokens > 1 and not entry.silent:
                self._speed.observe_step(self.decoding, (now - entry.since) / (output_tokens - 1))
            self.decoding -= 1
        else:
            entry = self._remote.pop(request, None) or self._leave_queue(request, now, computed=False)
            if entry is None:
                return
        self.active_blocks -= entry.blocks
        self.inflight -= 1
        self._refresh(now)

    def report(self, running: int, waiting: int, kv_usage: float, now: float) -> None:
        """The engine's newest load."""
        self._reported_running, self.waiting, self.kv_usage = running, waiting, kv_usage
        self.decoding += self._others.runs(max(0, running - self._most_inflight))
        self._inflight_at_report = self._most_inflight = self.inflight
        self.begun = self.begun_blocks = 0
        self._count_others(now)

    def report_others(self, tokens: int, requests: int, now: float) -> None:
        """Prompt tokens that the engine has to compute for other routers, and the requests that these are of."""
        self._others.tokens, self._others.requests = tokens, requests
        self._count_others(now)

    def _count_others(self, now: float) -> None:
        unknown = max(0, self.waiting - len(self._queue) - self._others.requests)
        self._others.count(self.rates, unknown * self._mean_seconds, self._own_seconds, now)
        self._refresh(now)

    def _leave_queue(self, request: Hashable, now: float, *, computed: bool) -> BegunRequest | None:
        entry = self._queue.get(request)
        if entry is None:
            return None
        head = next(iter(self._queue.values()))
        del self._queue[request]
        promised = self.promised
        for key in entry.promises:
            # A later request may have promised it again.
            if promised.get(key) is entry:
                del promised[key]
        self._own_tokens -= entry.new
        self._own_seconds = self._own_seconds - entry.seconds if self._queue else 0.0
        if entry is head:
            if computed and not self._others.left(self._busy_since):
                self._learn(entry.work, now - self._busy_since)
            else:
                self._done = None
            self._busy_since = now
        elif computed:
            # It was computed while the head was: the head's time covers both.
            head.work = together(head.work, entry.work)
        return entry

    def _learn(self, work: PrefillWork, seconds: float) -> None:
        if self._done is not None:
            work, seconds = together(work, self._done), seconds + self._done_seconds
        if self._queue and work[0] < _TOGETHER:
            self._done, self._done_seconds = work, seconds
        else:
            self._done = None
            self._speed.observe_prefill(work, seconds)

    def _refresh(self, now: float) -> None:
        """Bring the attributes that a choice reads up to date."""
        self.rates = self._speed.rates
        left = self._others.left(now)
        self.least_wait = 0.0
        self.silent_until = inf
        self.turns = ()
        if self.ordered and len(self._queue) > 1:
            self.turns = [(entry.turn, entry.seconds) for entry in self._queue.values()][1:]
        if self._queue:
            head = next(iter(self._queue.values()))
            if head.silent:
                self.silent_until = self._busy_since + head.seconds
            overdue = _OVERDUE * head.seconds
            behind = self._own_seconds - head.seconds
            self.least_wait = behind + overdue
            left += behind + max(overdue, head.seconds - (now - self._busy_since))
        self.free_at = now + left
        self.prefill_tokens = self._own_tokens + self._others.tokens
        self.running = max(
            self._reported_running + self.inflight - self._inflight_at_report, self.inflight - self.waiting
        )

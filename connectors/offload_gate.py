"""The cost gate in vLLM's scheduler: measures loads and steps, and says how far vLLM's lookup of a request may reach.

vLLM asks for the blocks of a waiting request again and again: until the lookup is answered, until there is room for the
request, and anew after a preemption. A lookup itself begins the reads from the SSD. So the gate decides before it, from
what is in memory alone, and writes nothing but the limit of the lookup (`max_load_tokens`, vLLM's own field for that).
A decision stands while reads are under way for it; any other is made again at the next question. It counts, and is
explained in the log, once the request has its blocks.

One block is loaded once: vLLM puts a request off while blocks that it needs are on their way for another, and the gate
counts such blocks as no load of their own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from vllm_pd.connectors import reused_blocks
from vllm_pd.connectors.engine_measures import KNOWN_LOADS, EngineMeasures
from vllm_pd.connectors.reset_fence import ResetFence
from vllm_pd.kv_offload import gate_metrics
from vllm_pd.kv_offload.cost_gate import (
    Beliefs,
    Decision,
    Prompt,
    Reason,
    Run,
    Tier,
    break_even_tokens,
    decide,
    told,
)
from vllm_pd.kv_offload.gate_memory import GateMemory
from vllm_pd.kv_offload.load_rates import LoadRate
from vllm_pd.tier_choices import LoadGate
from vllm_pd.vllm_compat import (
    LookupResult,
    OffloadingConnectorScheduler,
    OffloadingConnectorStats,
    OffloadingWorkerMetadata,
    ReqContext,
    RequestOffloadState,
)

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger(f"vllm.{__name__}")

_LEAST_PATIENCE_S = 0.02
"""A load is waited for at least so long: the engine looks for it between two steps only."""
_BLIND_PATIENCE_S = 2.0
"""And so long where nothing is known of computing."""
_GAUGES_EVERY_S = 1.0


@runtime_checkable
class MeasuredTier(Protocol):
    """What the gate needs of a tier below host memory. None of it blocks or changes anything."""

    @property
    def load_rate(self) -> LoadRate: ...

    @property
    def queued_load_bytes(self) -> int:
        """Of loads that were submitted and have not ended."""

    def holds(self, key: bytes, req_context: ReqContext) -> bool:
        """Whether a load of this block would be tried now for this request."""


@dataclass(slots=True)
class _Asked:
    """A request that waits for its blocks."""

    own_limit: int | None
    """What the client allows to load, in tokens."""
    computed: int
    decision: Decision
    beliefs: Beliefs
    waits_since: float | None = None
    """When a lookup was put off first."""
    busy_s: float = 0.0
    """Of the step clock, then."""
    late: bool = False


class OffloadGate:
    """Used by the scheduler's thread.

    Args:
        scheduler: the scheduler half of vLLM's offloading connector.
        mode: who decides.
        step_tokens: most prompt tokens of one step.
    """

    def __init__(self, scheduler: OffloadingConnectorScheduler, mode: LoadGate, step_tokens: int) -> None:
        self._scheduler = scheduler
        self._mode = mode
        self._step_tokens = step_tokens
        manager: Any = scheduler.manager
        self._host: Any = getattr(manager, "primary_tier", manager)
        self._ssd = next((t for t in getattr(manager, "secondary_tiers", ()) if isinstance(t, MeasuredTier)), None)
        self._measures = EngineMeasures(scheduler.config.num_workers)
        self._memory = GateMemory()
        self._fence = ResetFence()
        self._asked: dict[str, _Asked] = {}
        self._stats = OffloadingConnectorStats()
        self._gauges_at = float("-inf")

    def before_lookup(self, request: Request, computed: int, *, handed_over: bool) -> bool:
        """Say how far the lookup may reach.

        Args:
            computed: tokens that are on the GPU.
            handed_over: a prefill worker hands the blocks over, and the tiers are left alone.

        Returns:
            False: not now, see `ResetFence`; ask again in the next step.
        """
        if self._fence.closed and not handed_over:
            return False
        status: RequestOffloadState = self._scheduler._req_status[request.request_id]
        before = self._asked.get(request.request_id)
        if before is not None:
            if before.waits_since is not None and before.computed == computed:
                return True
            status.max_load_tokens = before.own_limit
        if request.skip_reading_prefix_cache:
            return True
        own_limit = status.max_load_tokens
        beliefs = self._beliefs()
        prompt = Prompt(request.num_tokens, computed, self._block_tokens, ())
        if not handed_over:
            prompt = self._prompt(request, status, computed)
        decision = self._decide(prompt, beliefs)
        asked = self._asked[request.request_id] = _Asked(own_limit, computed, decision, beliefs)
        status.max_load_tokens = 0 if handed_over else self._limit(asked)
        return True

    def ask_again(self, request: Request, matched: int | None, now: float) -> bool:
        """The lookup was answered, or with None put off. Whether to look again, for less: it has waited too long."""
        asked = self._asked.get(request.request_id)
        status: RequestOffloadState = self._scheduler._req_status[request.request_id]
        if asked is None or status.transfer_jobs:
            # Nothing to say, or what vLLM waits for is no load.
            return False
        if matched is not None:
            self._arrived(asked, now)
            return False
        if asked.waits_since is None:
            asked.waits_since, asked.busy_s = now, self._measures.busy_s
            return False
        if self._mode is not LoadGate.AUTO or asked.late or now - asked.waits_since < self._patience_s(asked):
            return False
        prompt = asked.decision.prompt
        ready = 0
        for run in self._prompt(request, status, asked.computed).runs:
            if run.tier is not Tier.CPU:
                break
            ready += run.blocks
        if ready >= asked.decision.blocks:
            return False
        asked.late = True
        asked.decision = told(prompt, asked.beliefs, ready, Reason.FASTER, Reason.LATE)
        status.max_load_tokens = self._limit(asked)
        return True

    def allocated(self, request: Request, now: float) -> None:
        """The request has its blocks on the GPU, to load into or to compute."""
        asked = self._forget(request.request_id)
        if asked is None:
            return
        self._memory.decided(asked.decision, asked.beliefs)
        if asked.decision.parts:
            gate_metrics.count(self._stats, asked.decision)
            logger.debug("vllm-pd: request %s: %s.", request.request_id, asked.decision.words)
        status: RequestOffloadState = self._scheduler._req_status[request.request_id]
        for job_id in status.transfer_jobs:
            job = self._scheduler._jobs[job_id]
            if not job.is_store:
                self._measures.loads(job_id, len(job.keys), now)

    def finished(self, request_id: str) -> None:
        """The request ended, perhaps without ever having got its blocks."""
        self._forget(request_id)

    @contextmanager
    def resetting(self) -> Iterator[None]:
        """While vLLM forgets its copies and empties host memory."""
        scheduler = self._scheduler
        # Of a reset before this one, with no step in between: vLLM refuses another one until the workers heard of it.
        unheard, scheduler._current_batch_jobs_to_flush = scheduler._current_batch_jobs_to_flush, set()
        if scheduler._jobs or unheard:
            self._fence.reset()
        reused_blocks.before_reset(scheduler)
        self._measures.reset()
        try:
            yield
        finally:
            scheduler._current_batch_jobs_to_flush |= unheard

    def scheduled(self, output: SchedulerOutput, now: float) -> None:
        """A step goes to the workers."""
        self._fence.step_scheduled()
        self._measures.scheduled(output, now)

    def transferred(self, meta: OffloadingWorkerMetadata) -> None:
        """The workers' transfers that ended with a step."""
        self._measures.transferred(meta)

    def step_ended(self, now: float) -> None:
        """The output of the oldest step under way has been taken in, after `transferred`."""
        self._fence.step_ended()
        for loaded in self._measures.step_ended(self._scheduler._jobs, now):
            self._memory.loaded(Tier.CPU, loaded.predicted_s, loaded.seconds)

    def take_stats(self, now: float) -> OffloadingConnectorStats | None:
        """What happened since the last call; None if nothing."""
        if now - self._gauges_at >= _GAUGES_EVERY_S:
            self._gauges_at = now
            self._set_gauges()
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, OffloadingConnectorStats()
        return stats

    @property
    def _group(self) -> int | None:
        """The KV group whose blocks are looked at: the first with full attention. Others follow it."""
        groups: Sequence[int] = self._scheduler._full_attention_groups
        return groups[0] if groups else None

    @property
    def _block_tokens(self) -> int:
        group = self._group
        return int(self._scheduler.config.kv_group_configs[group or 0].tokens_per_chunk)

    def _beliefs(self) -> Beliefs:
        measures, ssd = self._measures, self._ssd
        return Beliefs(
            prefill=measures.prefill,
            cpu=measures.cpu,
            ssd=None if ssd is None or ssd.load_rate.loads < KNOWN_LOADS else ssd.load_rate.speed,
            # A block of each group.
            block_bytes=measures.block_bytes * max(1, len(self._scheduler._full_attention_groups)),
            step_tokens=self._step_tokens,
            handover_s=measures.handover_s,
            cpu_queued=measures.queued_bytes,
            ssd_queued=0 if ssd is None else ssd.queued_load_bytes,
        )

    def _prompt(self, request: Request, status: RequestOffloadState, computed: int) -> Prompt:
        """Which tiers hold the request's leading blocks. O(blocks), changes nothing."""
        tokens, block_tokens = request.num_tokens, self._block_tokens
        group = self._group
        if group is None:
            return Prompt(tokens, computed, block_tokens, ())
        status.update_offload_keys()
        reach = tokens if status.max_load_tokens is None else min(tokens, computed + status.max_load_tokens)
        keys = status.group_states[group].offload_keys[computed // block_tokens : reach // block_tokens]
        loading = self._scheduler._chunks_being_loaded or ()
        runs: list[Run] = []
        tier, blocks = None, 0
        for key in keys:
            match self._host.lookup(key, status.req_context):
                case LookupResult.HIT:
                    found = Tier.COMING if key in loading else Tier.CPU
                case LookupResult.MISS:
                    if self._ssd is None or not self._ssd.holds(key, status.req_context):
                        break
                    found = Tier.SSD
                case _:
                    found = Tier.COMING
            if found is not tier and tier is not None:
                runs.append(Run(tier, blocks))
                blocks = 0
            tier, blocks = found, blocks + 1
        if tier is not None:
            runs.append(Run(tier, blocks))
        return Prompt(tokens, computed, block_tokens, tuple(runs))

    def _decide(self, prompt: Prompt, beliefs: Beliefs) -> Decision:
        if self._mode is LoadGate.AUTO:
            memory = self._memory
            return decide(prompt, beliefs, refused=memory.refused, avoided=memory.avoided, probe=memory.due)
        load = sum(run.blocks for run in prompt.runs) if self._mode is LoadGate.ALWAYS else 0
        return told(prompt, beliefs, load, Reason.ALWAYS, Reason.NEVER)

    def _limit(self, asked: _Asked) -> int | None:
        """Tokens that the lookup may add."""
        decision = asked.decision
        if decision.loads_all and self._mode is not LoadGate.NEVER:
            return asked.own_limit
        limit = decision.prompt.end_of(decision.blocks) - asked.computed
        return limit if asked.own_limit is None else min(limit, asked.own_limit)

    def _patience_s(self, asked: _Asked) -> float:
        """As long as computing what is waited for takes: waiting then costs at most as much again."""
        if asked.beliefs.prefill is None:
            return _BLIND_PATIENCE_S
        prompt = asked.decision.prompt
        blocks = 0
        for part in asked.decision.parts:
            if part.run.tier is not Tier.CPU:
                break
            blocks += part.run.blocks
        start, end = prompt.end_of(blocks), prompt.end_of(asked.decision.blocks)
        return max(_LEAST_PATIENCE_S, asked.beliefs.compute_s(end - start, start))

    def _arrived(self, asked: _Asked, now: float) -> None:
        if asked.waits_since is None or asked.late:
            # A decision that is late stands, or the request would wait again.
            return
        read = [part.run for part in asked.decision.parts if part.load and part.run.tier is Tier.SSD]
        if read and asked.beliefs.ssd is not None:
            seconds = now - asked.waits_since - (self._measures.busy_s - asked.busy_s)
            size = sum(run.blocks for run in read) * asked.beliefs.block_bytes
            predicted_s = asked.beliefs.handover_s + asked.beliefs.ssd.predict_s(size, asked.beliefs.ssd_queued)
            self._memory.loaded(Tier.SSD, predicted_s, max(0.0, seconds))
        asked.waits_since = None

    def _forget(self, request_id: str) -> _Asked | None:
        asked = self._asked.pop(request_id, None)
        status = self._scheduler._req_status.get(request_id)
        if asked is not None and status is not None:
            status.max_load_tokens = asked.own_limit
        return asked

    def _set_gauges(self) -> None:
        beliefs = self._beliefs()
        if beliefs.prefill is not None:
            self._stats.set_gauge(gate_metrics.TOKEN, beliefs.prefill.token_s)
        for tier in (Tier.CPU, Tier.SSD):
            if (speed := beliefs.speed_of(tier)) is None or (tier is Tier.SSD and self._ssd is None):
                continue
            labels = (str(tier),)
            self._stats.set_gauge(gate_metrics.LATENCY, speed.latency_s, labels)
            self._stats.set_gauge(gate_metrics.SPEED, speed.bytes_per_s, labels)
            if beliefs.prefill is not None:
                tokens = break_even_tokens(tier, beliefs, self._block_tokens)
                self._stats.set_gauge(gate_metrics.BREAK_EVEN, tokens or 0, labels)

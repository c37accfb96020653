"""What this engine's loads and steps take, for the cost gate."""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from vllm_pd.kv_offload.load_rates import CPU_PRIOR, LoadRate, LoadSpeed
from vllm_pd.kv_offload.prefill_rate import PrefillRate, PrefillSpeed, StepWork
from vllm_pd.kv_offload.step_clock import StepClock
from vllm_pd.vllm_compat import OffloadingWorkerMetadata

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

KNOWN_LOADS = 3
"""Loads from a tier, and steps with prompt tokens, from which on they are measured rather than unknown."""
KNOWN_PREFILLS = 8
_HANDOVERS = 32
"""Loads over which the hand-over is the median, and what it is before the first."""
_HANDOVER_PRIOR_S = 0.003


@dataclass(frozen=True, slots=True)
class _Loading:
    """A copy from host memory to the GPU."""

    blocks: int
    began: float
    busy_s: float
    """Of the step clock, then."""
    predicted_s: float


@dataclass(frozen=True, slots=True)
class Loaded:
    """A copy that ended, and what was predicted for it."""

    predicted_s: float
    seconds: float


class EngineMeasures:
    """Used by the scheduler's thread.

    Args:
        workers: that take part in each transfer.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._clock = StepClock()
        self._prefill = PrefillRate()
        self._cpu = LoadRate(CPU_PRIOR)
        self._handovers: deque[float] = deque([_HANDOVER_PRIOR_S], maxlen=_HANDOVERS)
        self._loading: dict[int, _Loading] = {}
        self._loaded_bytes = self._loaded_blocks = 0

    @property
    def prefill(self) -> PrefillSpeed | None:
        """None as long as too little was seen, here and below."""
        return self._prefill.speed if self._prefill.prefills >= KNOWN_PREFILLS else None

    @property
    def cpu(self) -> LoadSpeed | None:
        return self._cpu.speed if self._cpu.loads >= KNOWN_LOADS and self._loaded_blocks else None

    @property
    def handover_s(self) -> float:
        """From the end of a load until the engine goes on with the request, with nothing else to do."""
        return median(self._handovers)

    @property
    def block_bytes(self) -> int:
        """As far as seen; 0 before the first load."""
        return self._loaded_bytes // self._loaded_blocks if self._loaded_blocks else 0

    @property
    def queued_bytes(self) -> int:
        """On their way from host memory."""
        return sum(loading.blocks for loading in self._loading.values()) * self.block_bytes

    @property
    def busy_s(self) -> float:
        """Seconds in which the engine computed, all in all."""
        return self._clock.busy_s

    def scheduled(self, output: SchedulerOutput, now: float) -> None:
        """A step goes to the workers."""
        self._clock.scheduled(step_work(output), now)

    def loads(self, job: int, blocks: int, now: float) -> None:
        """`job` begins to copy `blocks` from host memory. Idempotent."""
        if job not in self._loading:
            predicted_s = self._cpu.predict_s(blocks * self.block_bytes, self.queued_bytes)
            self._loading[job] = _Loading(blocks, now, self._clock.busy_s, predicted_s)

    def transferred(self, meta: OffloadingWorkerMetadata) -> None:
        """The workers' transfers that ended with a step."""
        loads = meta.transfer_stats.load
        if loads.sizes and loads.bytes > 0:
            # All workers move their shares at the same time.
            jobs = max(1.0, len(loads.sizes) / self._workers)
            self._cpu.observe(round(loads.bytes / jobs), loads.time / len(loads.sizes))
            self._loaded_bytes += loads.bytes

    def step_ended(self, open_jobs: Container[int], now: float) -> list[Loaded]:
        """The output of the oldest step under way has been taken in, after `transferred`. Returns loads that ended."""
        if (step := self._clock.ended(now)) is not None:
            self._prefill.observe(*step)
        ended = []
        for job in [job for job in self._loading if job not in open_jobs]:
            loading = self._loading.pop(job)
            self._loaded_blocks += loading.blocks
            # Steps that computed something meanwhile were no wait.
            busy_s = self._clock.busy_s - loading.busy_s
            seconds = max(0.0, now - loading.began - busy_s)
            if busy_s <= seconds:
                # An engine with other work says nothing of what an idle one takes.
                self._handovers.append(max(0.0, seconds - self._cpu.predict_s(loading.blocks * self.block_bytes)))
            ended.append(Loaded(loading.predicted_s, seconds))
        return ended

    def reset(self) -> None:
        """vLLM forgets its jobs."""
        self._loading.clear()


def step_work(output: SchedulerOutput) -> StepWork:
    """What a step computes. A request that gets as many tokens as decoding gives is taken as decoding."""
    drafts = output.scheduled_spec_decode_tokens
    prompts = {
        request_id: tokens
        for request_id, tokens in output.num_scheduled_tokens.items()
        if tokens > 1 + len(drafts.get(request_id, ()))
    }
    work = StepWork(decoding=len(output.num_scheduled_tokens) - len(prompts))
    if not prompts:
        return work
    for new in output.scheduled_new_reqs:
        if new.req_id in prompts:
            work = work.plus_prompt(prompts[new.req_id], new.num_computed_tokens)
    cached = output.scheduled_cached_reqs
    for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        if request_id in prompts:
            work = work.plus_prompt(prompts[request_id], computed)
    return work

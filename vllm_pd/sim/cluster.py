"""A cluster of modelled engines behind one router, in virtual time: an hour of a trace takes seconds."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from vllm_pd.routing.split_rule import DEFAULT_RULE, SplitRule
from vllm_pd.sim.engine import Engine
from vllm_pd.sim.router import Placement, SimRouter
from vllm_pd.sim.timing import TimingModel
from vllm_pd.sim.trace import TraceRequest
from vllm_pd.sim.work import EngineConfig, Outcome, Step, Work
from vllm_pd.state.base import Role

ITL_RESOLUTION = 1e-4
"""Seconds; gaps between tokens are counted to this."""


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """What is simulated. Times in seconds."""

    policy: str = "predicted"
    workers: int = 4
    """That do both; with `prefill` and `decode` above 0 it is 0."""
    prefill: int = 0
    decode: int = 0
    rule: SplitRule = DEFAULT_RULE
    """When a request is split between prefill and decode workers."""
    speed: float = 1.0
    """Arrivals come so many times as fast as the trace says."""
    engine: EngineConfig = EngineConfig()
    timing: TimingModel = TimingModel()
    seed: int = 0
    temperature: float = 0.0
    event_delay: float = 0.005
    """From a change of a worker's cache until the router knows."""
    report_every: float = 0.25
    """Between two load reports of a worker."""

    @property
    def roles(self) -> tuple[Role, ...]:
        return (Role.BOTH,) * self.workers + (Role.PREFILL,) * self.prefill + (Role.DECODE,) * self.decode


@dataclass(slots=True)
class Served:
    """One request, as its client and the workers saw it."""

    arrived: float
    prompt: int
    output: int
    worker: int = -1
    """That answered it."""
    prefiller: int = -1
    """That computed the prompt for it, if another."""
    first_token: float = -1.0
    finished: float = -1.0
    gpu: int = 0
    """Prompt tokens found on each tier by the worker that computed the prompt."""
    cpu: int = 0
    ssd: int = 0
    preemptions: int = 0

    @property
    def ttft(self) -> float:
        return self.first_token - self.arrived


@dataclass(slots=True)
class Run:
    """What came of a simulation."""

    config: ClusterConfig
    served: list[Served] = field(default_factory=list)
    """Requests that ended, in order of arrival: the simulation goes on until nothing is left."""
    refused: int = 0
    """Requests that no worker's cache can hold."""
    gaps: Counter[int] = field(default_factory=Counter)
    """Time between two tokens of a request, in units of `ITL_RESOLUTION` -> how often."""
    busy: list[float] = field(default_factory=list)
    """Seconds that each worker computed."""
    makespan: float = 0.0
    preemptions: int = 0
    unfinished: int = 0


class SimWorker:
    __slots__ = ("busy", "engine", "index", "reported", "step", "version")

    def __init__(self, index: int, engine: Engine) -> None:
        self.index = index
        self.engine = engine
        self.step: Step | None = None
        self.version = 0
        """Of the wake-up that counts; older ones in the queue are void."""
        self.busy = 0.0
        self.reported = (0, 0, 0.0)


@dataclass(slots=True, eq=False)
class Job:
    """One attempt at a request, on its way through the cluster."""

    token: int
    request: TraceRequest
    served: Served
    placement: Placement
    prefill: Work | None = None
    """Of the prefill worker, if another one decodes."""
    decode: Work | None = None
    """Of the worker that answers, once it was sent there."""


class Cluster:
    """Runs one trace once."""

    def __init__(self, config: ClusterConfig, router: SimRouter | None = None) -> None:
        self.config = config
        self.run = Run(config)
        self._workers = [SimWorker(i, Engine(config.engine, config.timing)) for i in range(len(config.roles))]
        self._router = router or SimRouter(
            config.policy,
            config.roles,
            config.engine,
            rule=config.rule,
            seed=config.seed,
            temperature=config.temperature,
        )
        self._queue: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._tokens = itertools.count()
        self._open = 0

    def simulate(
        self, trace: Sequence[TraceRequest], progress: Callable[[int], None] | None = None, until: float = float("inf")
    ) -> Run:
        """Replay a trace until its last request has ended, or to the time `until`. `progress` is told the number of
        arrivals so far."""
        arrivals = ((request.at / self.config.speed, request) for request in trace)
        arriving = next(arrivals, None)
        report_at = self.config.report_every
        arrived = 0
        now = 0.0
        while arriving or self._open:
            due = self._queue[0][0] if self._queue else float("inf")
            if arriving and arriving[0] <= due:
                due = arriving[0]
            if report_at <= due:
                if due == float("inf"):
                    break
                # Reports of quiet times say nothing new.
                report_at = max(report_at, due - due % self.config.report_every)
                self._report(report_at)
                report_at += self.config.report_every
            elif arriving and arriving[0] == due:
                now = due
                self._arrive(arriving[1], now)
                arrived += 1
                if progress and not arrived % 100:
                    progress(arrived)
                arriving = next(arrivals, None)
            elif due > until:
                break
            else:
                now, _, action = heapq.heappop(self._queue)
                action(now)
        run = self.run
        run.makespan = now
        run.unfinished = self._open
        run.busy = [worker.busy for worker in self._workers]
        run.preemptions = sum(worker.engine.preemptions for worker in self._workers)
        run.served = [served for served in run.served if served.finished >= 0]
        return run

    # Requests.

    def _arrive(self, request: TraceRequest, now: float) -> None:
        if not self._workers[0].engine.fits(request.prompt, request.output):
            self.run.refused += 1
            return
        self._open += 1
        served = Served(now, request.prompt, request.output)
        self.run.served.append(served)
        self._place(request, served, now)

    def _place(self, request: TraceRequest, served: Served, now: float) -> None:
        token = next(self._tokens)
        placement = self._router.place(token, request, now)
        job = Job(token, request, served, placement)
        served.worker = placement.worker
        self._placed(job)
        if placement.prefiller is None:
            job.decode = Work(job, request.prompt, request.output, request.keys, priority=placement.turn)
            self._send(placement.worker, job.decode, now)
            return
        served.prefiller = placement.prefiller
        job.prefill = Work(job, request.prompt, 1, request.keys, hold=True, priority=placement.turn)
        self._send(placement.prefiller, job.prefill, now)

    def _placed(self, job: Job) -> None:
        """It is known where a request goes; it is sent now."""

    def _send(self, index: int, work: Work, now: float) -> None:
        worker = self._workers[index]
        cut = worker.engine.add(work)
        if worker.step is None:
            self._begin(worker, now)
        elif cut:
            self._cut(worker, now)

    # Engines.

    def _begin(self, worker: SimWorker, now: float) -> None:
        worker.version += 1
        step = worker.step = worker.engine.begin(now)
        if step is not None:
            self._wake(worker, step.ends)
            return
        self._apply(worker, worker.engine.end(), now)
        at = worker.engine.next_load
        if at is not None and worker.step is None:
            self._wake(worker, at)

    def _cut(self, worker: SimWorker, now: float) -> None:
        assert worker.step is not None
        ends = worker.step.ends
        if worker.engine.cut(now) < ends:
            worker.version += 1
            self._wake(worker, worker.step.ends)

    def _wake(self, worker: SimWorker, at: float) -> None:
        version = worker.version

        def wake(now: float) -> None:
            if version == worker.version:
                self._end(worker, now)

        self._at(at, wake)

    def _end(self, worker: SimWorker, now: float) -> None:
        step = worker.step
        outcome = worker.engine.end()
        if step is not None:
            worker.busy += step.seconds
            worker.step = None
            if step.decoding:
                self._gaps(step.each, step.decoding * step.iterations)
        self._apply(worker, outcome, now)
        self._between_steps(worker, now)
        if worker.step is None:
            self._begin(worker, now)

    def _gaps(self, seconds: float, count: int) -> None:
        """So many tokens came so long after the one before them."""
        self.run.gaps[round(seconds / ITL_RESOLUTION)] += count

    def _between_steps(self, worker: SimWorker, now: float) -> None:
        """What has come of a step is told; the next one has not begun."""

    def _apply(self, worker: SimWorker, outcome: Outcome, now: float) -> None:
        if outcome.changed:
            changed = outcome.changed
            self._at(now + self.config.event_delay, lambda _: self._router.apply(worker.index, changed))
        for work in outcome.fetched:
            self._fetched(_job(work), now)
        for work in outcome.first_tokens:
            job = _job(work)
            if work is job.prefill:
                continue
            self._first_token(job, now)
        for work in outcome.finished:
            self._finished(_job(work), work, now)

    def _fetched(self, job: Job, now: float) -> None:
        if job.prefill is not None and job.placement.prefiller is not None:
            self._release(self._workers[job.placement.prefiller], job.prefill, now)

    def _first_token(self, job: Job, now: float) -> None:
        job.served.first_token = now
        self._router.first_token(job.token, now)

    def _finished(self, job: Job, work: Work, now: float) -> None:
        served = job.served
        size = self.config.engine.block_size
        if work is job.prefill or job.prefill is None:
            served.gpu += work.gpu_hits * size
            served.cpu += work.cpu_hits * size
            served.ssd += work.ssd_hits * size
        served.preemptions += work.preemptions
        if work is job.prefill:
            self._prefilled(job, now)
            return
        served.finished = now
        self._open -= 1
        self._router.finish(job.token, now)

    def _prefilled(self, job: Job, now: float) -> None:
        request = job.request
        self._router.prefilled(job.token, now)
        job.decode = Work(job, request.prompt, request.output, request.keys, remote=True)
        self._send(job.placement.worker, job.decode, now)

    def _release(self, worker: SimWorker, work: Work, now: float) -> None:
        worker.engine.release(work)
        if worker.engine.waiting:
            if worker.step is None:
                self._begin(worker, now)
            else:
                self._cut(worker, now)

    # What the router is told.

    def _report(self, now: float) -> None:
        for worker in self._workers:
            engine = worker.engine
            load = (engine.running, engine.waiting, engine.kv_usage)
            if load != worker.reported:
                worker.reported = load
                self._router.report(worker.index, *load, now)

    def _at(self, time: float, action: Callable[[float], None]) -> None:
        heapq.heappush(self._queue, (time, next(self._order), action))


def _job(work: Work) -> Job:
    assert isinstance(work.tag, Job)
    return work.tag

"""A simulated cluster whose workers come, go and change roles, and whose requests go on elsewhere when they do."""

from __future__ import annotations

import random
from collections.abc import Callable

from vllm_pd.planner.model import PLANNER, GiveUp
from vllm_pd.sim.cluster import Cluster, Job, Served, SimWorker
from vllm_pd.sim.engine import Engine
from vllm_pd.sim.planned_config import PlannedConfig
from vllm_pd.sim.planned_report import mean_itl
from vllm_pd.sim.planned_run import Member, PlannedRun, State
from vllm_pd.sim.planned_view import DemandCount
from vllm_pd.sim.router import SimRouter
from vllm_pd.sim.trace import TraceRequest
from vllm_pd.sim.work import Work
from vllm_pd.state.base import Epoch, Role, WorkerId


class ChangingCluster(Cluster):
    """Runs one trace once. Who changes its workers calls `_start`, `_leave`, `_move` and `_give_up`."""

    def __init__(self, config: PlannedConfig) -> None:
        cluster = config.cluster
        router = SimRouter(
            cluster.policy,
            cluster.roles,
            cluster.engine,
            rule=cluster.rule,
            seed=cluster.seed,
            temperature=cluster.temperature,
            both_hand_over=True,
        )
        super().__init__(cluster, router)
        self._router: SimRouter = router
        self._life = config.life
        self._counts = DemandCount()
        self._chance = random.Random(cluster.seed + 1)
        self._by_index: list[Member] = []
        self._names = 0
        self.planned = PlannedRun(config, self.run)
        for index, role in enumerate(cluster.roles):
            member = self._new_member(role, 0.0)
            member.state, member.index, member.startup_s = State.UP, index, self._life.cold_start
            self._by_index.append(member)

    # Starts and ends.

    def _new_member(self, role: Role, now: float) -> Member:
        self._names += 1
        member = Member(WorkerId(f"w{self._names}"), Epoch(1), role, now, role)
        self.planned.members.append(member)
        return member

    def _start(self, role: Role, now: float, again: Member | None = None) -> None:
        """Ask for a worker, or for another start of one."""
        member = self._new_member(role, now)
        if again is not None:
            self._names -= 1
            member.id, member.epoch = again.id, Epoch(again.epoch + 1)
        life = self._life
        if life.start_fails and self._chance.random() < life.start_fails:
            return
        takes = life.cold_start * (1.0 + life.start_spread * self._chance.uniform(-1.0, 1.0))
        member.startup_s = takes
        self._at(now + takes, lambda now: self._up(member, now))

    def _up(self, member: Member, now: float) -> None:
        if member.state is not State.STARTING:
            return
        member.index = self._router.add(member.role)
        member.state, member.since = State.UP, now
        self._workers.append(SimWorker(member.index, Engine(self.config.engine, self.config.timing)))
        self._by_index.append(member)
        self._doom(member, now)

    def _give_up(self, given: GiveUp, now: float) -> None:
        waiting = [m for m in self.planned.members if m.state is State.STARTING and m.role is given.role]
        for member in sorted(waiting, key=lambda m: m.asked_at)[: given.count]:
            self.planned.given_up += 1
            self._gone(member, now)

    def _gone(self, member: Member, now: float) -> None:
        member.state, member.gone_at, member.moving_to = State.GONE, now, None
        if member.index >= 0:
            self._router.remove(member.index)

    def _leave(self, member: Member, now: float) -> None:
        """Drain and go."""
        member.state, member.since = State.LEAVING, now
        self._router.give(member.index, None)
        self._give_back(member, now)
        self._at(now + self._life.hand_over_after, lambda now: self._hand_over(member, now, State.LEAVING))
        self._settle(member, now)

    def _doom(self, member: Member, now: float) -> None:
        if self._life.lost_per_hour:
            after = self._chance.expovariate(self._life.lost_per_hour / 3600)
            self._at(now + after, lambda now: self._between(member, now, self._die))

    def _die(self, member: Member, now: float) -> None:
        if member.state is State.GONE:
            return
        self.planned.died += 1
        returns = member.state is not State.LEAVING
        self._gone(member, now)
        member.listed_until = now + self._life.lease
        again: list[tuple[Job, int]] = []
        # Those held for others last: the engine goes on when one of them is released, unless it has nothing to do.
        for job in [*member.decoding, *sorted(member.prefilling, key=lambda job: job.decode is not None)]:
            generated = self._taken(job, now)
            if job.served.first_token >= 0 and not self._continuable(job):
                self.planned.lost += 1
                self._open -= 1
            else:
                again.append((job, generated))
        for job, generated in again:
            self._again(job, generated, now)
        if returns:
            self._start(member.started_as, now, member)

    # Changes of role.

    def _move(self, member: Member, to: Role, now: float) -> None:
        if not self._life.in_place:
            member.returns_as = to
            self._leave(member, now)
            return
        member.state, member.since, member.moving_to = State.MOVING, now, to
        member.asked_by = PLANNER
        kept = {Role.PREFILL, Role.DECODE} if member.role is Role.BOTH else {member.role}
        if to is not Role.BOTH:
            kept &= {to}
        self._router.give(member.index, kept.pop() if len(kept) == 1 else member.role if kept else None)
        if not to.prefills:
            self._give_back(member, now)
        life, since = self._life, now
        self._at(now + life.hand_over_after, lambda now: self._hand_over(member, now, State.MOVING, since))
        self._at(now + life.move_timeout, lambda now: self._undo(member, since))
        self._settle(member, now)

    def _undo(self, member: Member, since: float) -> None:
        if member.state is State.MOVING and member.since == since:
            member.state, member.moving_to = State.UP, None
            self.planned.undone += 1
            self._router.give(member.index, member.role)

    def _settle(self, member: Member, now: float) -> None:
        """Whether what drains has drained."""
        if member.state is State.MOVING:
            to = member.moving_to
            assert to is not None
            if (member.prefilling and not to.prefills) or (member.decoding and not to.decodes):
                return
            self.planned.moves.append(now - member.since)
            member.state, member.role, member.moving_to, member.since = State.UP, to, None, now
            self._router.give(member.index, to)
        elif member.state is State.LEAVING and not member.prefilling and not member.decoding:
            self._gone(member, now)
            if member.returns_as is not None:
                self.planned.moves.append(now - member.since)
                self._start(member.returns_as, now, member)

    def _unstarted(self, member: Member) -> list[Job]:
        """Whose prompts wait for it, of those that it computes for others."""
        waiting = set(self._workers[member.index].engine.unstarted)
        return [job for job in member.prefilling if job.prefill in waiting]

    def _give_back(self, member: Member, now: float) -> None:
        for job in self._unstarted(member):
            self._again(job, self._taken(job, now), now)

    def _hand_over(self, member: Member, now: float, state: State, since: float | None = None) -> None:
        """The streams of a worker that drains go on elsewhere, if it still does."""

        def hand_over(member: Member, now: float) -> None:
            if member.state is not state or (since is not None and member.since != since):
                return
            if member.moving_to is not None and member.moving_to.decodes:
                return
            jobs = [j for j in member.decoding if j.served.first_token < 0 or self._continuable(j)]
            self.planned.handed_over += len(jobs)
            for job, generated in [(job, self._taken(job, now)) for job in jobs]:
                self._again(job, generated, now)
            self._settle(member, now)

        self._between(member, now, hand_over)

    # Requests that go on elsewhere.

    def _continuable(self, job: Job) -> bool:
        # The same answer each time it is asked of a request.
        return hash((job.request.at, job.served.prompt)) % 1000 < 1000 * self._life.continuable

    def _between(self, member: Member, now: float, action: Callable[[Member, float], None]) -> None:
        """Do something to a worker's requests when its step in progress has ended."""
        if member.index < 0 or member.state is State.GONE:
            return
        worker = self._workers[member.index]
        if worker.step is None:
            action(member, now)
            return
        earlier = member.dropping

        def both(now: float) -> None:
            if earlier is not None:
                earlier(now)
            action(member, now)

        member.dropping = both
        self._cut(worker, now)

    def _between_steps(self, worker: SimWorker, now: float) -> None:
        dropping = self._by_index[worker.index].dropping
        if dropping is not None:
            self._by_index[worker.index].dropping = None
            dropping(now)

    def _taken(self, job: Job, now: float) -> int:
        """Take a request from all workers. Returns how many tokens of its answer are there."""
        generated = 0
        decoder = self._by_index[job.placement.worker]
        if job in decoder.decoding:
            del decoder.decoding[job]
            if job.decode is not None:
                engine = self._workers[decoder.index].engine
                generated = engine.generated(job.decode)
                engine.abort(job.decode)
        if job.placement.prefiller is not None and job.prefill is not None:
            prefiller = self._by_index[job.placement.prefiller]
            if job in prefiller.prefilling:
                engine = self._workers[prefiller.index].engine
                if job.decode is None:
                    engine.abort(job.prefill)
                    del prefiller.prefilling[job]
                    self._settle(prefiller, now)
                else:
                    self._release(self._workers[prefiller.index], job.prefill, now)
        self._settle(decoder, now)
        self._router.withdraw(job.token, now)
        return generated

    def _again(self, job: Job, generated: int, now: float) -> None:
        """Place a request again, with the tokens it has as part of the prompt."""
        request = job.request
        rest = TraceRequest(request.at, request.prompt + generated, request.output - generated, request.keys)
        self._place(rest, job.served, now)

    # What the cluster tells.

    def _arrive(self, request: TraceRequest, now: float) -> None:
        self._counts.arrivals += 1
        self._counts.prompt_tokens += request.prompt
        if self._router.has_decoders:
            super()._arrive(request, now)
        else:
            self.planned.turned_away += 1

    def _place(self, request: TraceRequest, served: Served, now: float) -> None:
        if self._router.has_decoders:
            super()._place(request, served, now)
        else:
            self._at(now + 1.0, lambda now: self._place(request, served, now))

    def _placed(self, job: Job) -> None:
        placement = job.placement
        if job.served.first_token < 0:
            self._counts.uncached_tokens += placement.uncached
        if placement.prefiller is None:
            self._by_index[placement.worker].decoding[job] = None
        else:
            self._by_index[placement.prefiller].prefilling[job] = None

    def _prefilled(self, job: Job, now: float) -> None:
        if not self._router.decodes(job.placement.worker):
            placement = self._router.redirect(job.token, job.request, now)
            if placement is None:
                assert job.placement.prefiller is not None and job.prefill is not None
                self._router.withdraw(job.token, now)
                self._release(self._workers[job.placement.prefiller], job.prefill, now)
                self._again(job, 0, now)
                return
            job.placement = placement
            job.served.worker = placement.worker
        self._by_index[job.placement.worker].decoding[job] = None
        super()._prefilled(job, now)

    def _first_token(self, job: Job, now: float) -> None:
        self._router.first_token(job.token, now)
        if job.served.first_token < 0:
            job.served.first_token = now
            self._counts.first_token(now - job.served.arrived)
        else:
            self._counts.output_tokens += 1

    def _gaps(self, seconds: float, count: int) -> None:
        super()._gaps(seconds, count)
        self._counts.gaps(seconds, count)

    def _finished(self, job: Job, work: Work, now: float) -> None:
        super()._finished(job, work, now)
        if work is not job.prefill:
            self._counts.ended(job.served.output, mean_itl(job.served))
            member = self._by_index[job.placement.worker]
            member.decoding.pop(job, None)
            self._settle(member, now)

    def _release(self, worker: SimWorker, work: Work, now: float) -> None:
        super()._release(worker, work, now)
        assert isinstance(work.tag, Job)
        member = self._by_index[worker.index]
        member.prefilling.pop(work.tag, None)
        self._settle(member, now)

"""One engine as vLLM's scheduler runs it, in somebody else's time.

The owner calls `begin(now)`, lets `Step.seconds` pass (or `cut`s the step short when a request arrives), then calls
`end()`, which says what came of it. Decode steps in which nothing changes are taken as one `Step` of many iterations,
so that an hour of a cluster costs seconds.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

from vllm_pd.block_hash import BlockKey
from vllm_pd.kv_offload.policies import POLICIES, Lru
from vllm_pd.sim.blocks import ANONYMOUS, BlockPool, LowerTier
from vllm_pd.sim.loads import Loads
from vllm_pd.sim.timetable import Timetable
from vllm_pd.sim.timing import TimingModel
from vllm_pd.sim.work import EngineConfig, Outcome, Step, Work
from vllm_pd.state.block_index import Tier


class Engine:
    """Continuous batching with chunked prefill over an LRU block cache. Single-threaded, no clock of its own."""

    def __init__(self, config: EngineConfig, timing: TimingModel) -> None:
        self.config = config
        self.timing = timing
        self._changed: set[BlockKey] = set()
        self.pool = BlockPool(config.gpu_blocks, self._changed)
        self.cpu = LowerTier(POLICIES[config.eviction](config.cpu_blocks), self._changed)
        self.ssd = LowerTier(Lru(config.ssd_blocks), self._changed)
        self._tiered = bool(config.cpu_blocks or config.ssd_blocks)
        self._waiting: deque[Work] = deque()
        self._running: dict[Work, None] = {}
        """In order of admission, which is the order of preemption from its end."""
        self._prefilling: dict[Work, None] = {}
        self._decoding: dict[Work, None] = {}
        self._timetable = Timetable(config.block_size)
        self._loads = Loads()
        self._fetched: list[Work] = []
        self._step: Step | None = None
        self.preemptions = 0

    # What a load report says.

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._loads)

    @property
    def decoding(self) -> int:
        return len(self._decoding)

    @property
    def kv_usage(self) -> float:
        return self.pool.used / self.pool.size

    @property
    def idle(self) -> bool:
        return not (self._running or self._waiting or self._loads)

    @property
    def empty(self) -> bool:
        """Whether it has no request, and holds no block for another worker."""
        return self.idle and not self.pool.used

    @property
    def unstarted(self) -> Iterator[Work]:
        """Requests in its queue of which nothing is done or loaded yet."""
        return (work for work in self._waiting if not (work.blocks or work.generated))

    @property
    def next_load(self) -> float | None:
        """When the next load ends, while no step is in progress that would notice."""
        return self._loads.next_end

    def fits(self, prompt: int, output: int) -> bool:
        """Whether the cache can hold such a request at all; vLLM refuses what its context length cannot."""
        return prompt + output <= self.config.gpu_blocks * self.config.block_size

    @property
    def decoders(self) -> Iterable[Work]:
        """The requests past their first token, in order of admission."""
        return self._decoding

    def generated(self, work: Work) -> int:
        """Tokens that a request has so far."""
        return work.generated + (self._timetable.iteration - work.since if work in self._decoding else 0)

    # Requests in and out.

    def add(self, work: Work) -> bool:
        """Queue a request. Returns whether the step in progress should be `cut` for it: it could start sooner."""
        waiting = self._waiting
        place = len(waiting)
        if self.config.scheduling_policy == "priority":
            # Those that hold blocks were taken before.
            while place and waiting[place - 1].priority > work.priority and not waiting[place - 1].blocks:
                place -= 1
        waiting.insert(place, work)
        return len(self._waiting) == 1 and len(self._running) < self.config.max_num_seqs

    def release(self, work: Work) -> None:
        """Let go of the blocks of a request that has finished and was to hold them."""
        self.pool.release(work.blocks)
        work.blocks = []
        work.named = 0

    def abort(self, work: Work) -> None:
        """Forget a request whose client has gone, between steps."""
        if work in self._running:
            self._leave(work)
        elif work.loading:
            self._loads.drop(work)
        else:
            self._waiting.remove(work)
        self.release(work)

    def reset_cache(self) -> Mapping[BlockKey, int] | None:
        """Forget the GPU's cached blocks; returns the changes, or None when requests hold blocks."""
        return self._take_changes() if self.pool.clear() else None

    # Steps.

    def begin(self, now: float, longest: int = 1_000_000) -> Step | None:
        """Schedule the next step, of at most `longest` iterations. None: nothing to do until a request is added, or
        until `next_load`."""
        self._end_loads(now)
        prefilled: list[tuple[Work, int]] = []
        preempted = self.preemptions
        self._grow_decoders()
        budget = self.config.max_num_batched_tokens - len(self._decoding)
        for work in list(self._prefilling):
            if budget <= 0:
                break
            count = min(work.tokens - work.computed, budget)
            if work not in self._running or not self._allocate(work, work.computed + count):
                break
            prefilled.append((work, count))
            budget -= count
        if preempted == self.preemptions:
            self._admit(now, budget, prefilled)
        else:
            prefilled = [(work, count) for work, count in prefilled if work in self._prefilling]
        if not prefilled and not self._decoding:
            self._step = None
            return None
        decode = self.timing.decode(self.kv_usage, len(self._decoding)) if self._decoding else 0.0
        iterations = 1
        each = decode
        if prefilled:
            each = self._prefill_seconds(prefilled) + decode
        elif preempted == self.preemptions:
            iterations = max(1, min(self._quiet_iterations(now, each), longest))
        self._step = Step(now, each, iterations, prefilled, len(self._decoding))
        return self._step

    def cut(self, now: float) -> float:
        """End the step after the iteration that is in progress at `now`; returns when that is."""
        step = self._step
        assert step is not None
        if step.iterations > 1:
            step.iterations = min(step.iterations, max(1, math.ceil((now - step.started) / step.each - 1e-9)))
        return step.ends

    def end(self) -> Outcome:
        """The step's time has passed: what came of it."""
        outcome = Outcome(fetched=self._fetched)
        self._fetched = []
        step = self._step
        if step is not None:
            self._step = None
            self._timetable.iteration += step.iterations
            for work in self._timetable.ending():
                self._timetable.settle(work)
                self._finish(work, outcome)
            for work, count in step.prefilled:
                work.computed += count
                if work.computed == work.tokens:
                    self._prefilling.pop(work)
                    self._token(work, outcome)
        outcome.changed = self._take_changes()
        return outcome

    # Scheduling.

    def _grow_decoders(self) -> None:
        """A block for every sequence whose next token begins one; the last admitted give way when there is none."""
        for work in self._timetable.needing():
            self._timetable.settle(work)
            if self._allocate(work, work.tokens):
                self._timetable.grows(work)

    def _admit(self, now: float, budget: int, prefilled: list[tuple[Work, int]]) -> None:
        """Take requests from the waiting queue, in its order, while budget and blocks last."""
        while self._waiting and budget > 0 and len(self._running) < self.config.max_num_seqs:
            work = self._waiting[0]
            if not (self._has_room(work) if work.blocks else self._find_cached(work, now)):
                if self._running or self._loads or not self._yield_blocks():
                    break
                continue
            self._waiting.popleft()
            if work.loading:
                continue
            count = min(work.tokens - work.computed, budget)
            self._running[work] = None
            self._prefilling[work] = None
            self._allocate(work, work.computed + count)
            prefilled.append((work, count))
            budget -= count

    def _has_room(self, work: Work) -> bool:
        """Whether the rest of the prompt fits, beyond the blocks that the request has."""
        return -(-work.tokens // self.config.block_size) - len(work.blocks) <= self.pool.free

    def _yield_blocks(self) -> bool:
        """The last waiting request that holds loaded blocks gives them up: requests could wait for each other's."""
        for work in reversed(self._waiting):
            if work.blocks and work is not self._waiting[0]:
                self.release(work)
                work.computed = work.start = 0
                work.remote = False
                return True
        return False

    def _find_cached(self, work: Work, now: float) -> bool:
        """Take what the caches hold of a request's prompt, starting a load for what is not on the GPU.

        Returns False when there is no room for the whole prompt.
        """
        size = self.config.block_size
        whole = (work.tokens - 1) // size
        hits = self.pool.hits(work.keys, whole)
        lower: list[Tier] = []
        if self._tiered and not work.remote:
            for key in itertools.islice(work.keys, len(hits), whole):
                tier = Tier.CPU if key in self.cpu else Tier.SSD if key in self.ssd else Tier.NONE
                if not tier:
                    break
                lower.append(tier)
        needed = -(-work.tokens // size) - len(hits)
        if needed > self.pool.free - self.pool.count_free(hits):
            return False
        self.pool.take(hits)
        work.blocks = list(hits)
        work.named = len(hits)
        work.computed = work.start = len(hits) * size
        if work.remote:
            # The last token is computed here, for its logits.
            external = work.tokens - 1 - work.computed
            if external > 0:
                seconds = self.timing.transfer_base + external * self.timing.transfer_token
                work.blocks += self.pool.allocate(needed)
                work.computed = work.start = work.tokens - 1
                self._loads.start(work, now + seconds)
            else:
                self._fetched.append(work)
        elif lower:
            on_ssd = lower.count(Tier.SSD)
            seconds = size * ((len(lower) - on_ssd) * self.timing.cpu_token + on_ssd * self.timing.ssd_token)
            work.blocks += self.pool.allocate(len(lower))
            work.computed = work.start = len(work.blocks) * size
            self._loads.start_on_link(work, now, seconds)
        if not work.generated:
            work.gpu_hits = len(hits)
            work.ssd_hits = lower.count(Tier.SSD)
            work.cpu_hits = len(lower) - work.ssd_hits
            work.cached = work.computed
        if self._tiered:
            self._write_through(work.keys[: work.computed // size])
        return True

    def _end_loads(self, now: float) -> None:
        """Requests whose KV has arrived go to the head of the queue."""
        for work in reversed(self._loads.ended(now)):
            self._name_full(work, work.computed)
            self._waiting.appendleft(work)
            if work.remote:
                self._fetched.append(work)

    def _allocate(self, work: Work, tokens: int) -> bool:
        """Blocks for the first `tokens` tokens of a running request, named as far as they will be full after this
        step. Returns False when the request itself had to give way."""
        missing = -(-tokens // self.config.block_size) - len(work.blocks)
        while missing > self.pool.free:
            victim = next(reversed(self._running))
            self._preempt(victim)
            if victim is work:
                return False
        if missing > 0:
            work.blocks += self.pool.allocate(missing)
        self._name_full(work, tokens)
        return True

    def _name_full(self, work: Work, tokens: int) -> None:
        """State the content of blocks that are full with the first `tokens` tokens."""
        full = tokens // self.config.block_size
        named = work.named
        if named >= full:
            return
        work.named = full
        keys = work.keys
        known = len(keys)
        for i in range(named, full):
            self.pool.name(work.blocks[i], keys[i] if i < known else ANONYMOUS)
        if self._tiered and named < known:
            self._write_through(keys[named : min(full, known)])

    def _write_through(self, keys: Sequence[BlockKey]) -> None:
        self.cpu.add(keys)
        self.ssd.add(keys)

    def _prefill_seconds(self, prefilled: Sequence[tuple[Work, int]]) -> float:
        seconds = 0.0
        for work, count in prefilled:
            seconds += self.timing.prefill(count, work.computed - work.start, work.start)
        # One token is a decode step like any other: the last of a prompt whose KV came from elsewhere.
        if all(count == 1 for _, count in prefilled):
            return seconds + (0.0 if self._decoding else self.timing.decode(self.kv_usage, len(prefilled)))
        return seconds + self.timing.prefill_base

    def _quiet_iterations(self, now: float, each: float) -> int:
        """How many decode iterations from now are alike: none ends, none needs a block, no load arrives."""
        quiet = self._timetable.quiet()
        next_load = self._loads.next_end
        return quiet if next_load is None else min(quiet, math.ceil((next_load - now) / each))

    # A request's life.

    def _token(self, work: Work, outcome: Outcome) -> None:
        """A prompt is computed: it gives one token, and the request decodes or ends."""
        work.generated += 1
        work.tokens += 1
        if work.generated == 1:
            outcome.first_tokens.append(work)
        if work.generated >= work.output:
            self._finish(work, outcome)
            return
        self._decoding[work] = None
        self._timetable.decodes(work)

    def _finish(self, work: Work, outcome: Outcome) -> None:
        self._name_full(work, work.tokens - 1)
        self._leave(work)
        if not work.hold:
            self.release(work)
        outcome.finished.append(work)

    def _preempt(self, work: Work) -> None:
        """Give its blocks to others; it is computed again, with what the cache then holds of it."""
        if work in self._decoding:
            self._timetable.settle(work)
        self._leave(work)
        self.release(work)
        work.computed = work.start = 0
        work.remote = False
        work.preemptions += 1
        self.preemptions += 1
        self._waiting.appendleft(work)

    def _leave(self, work: Work) -> None:
        work.version += 1
        self._running.pop(work, None)
        self._prefilling.pop(work, None)
        self._decoding.pop(work, None)

    def _take_changes(self) -> Mapping[BlockKey, int]:
        changed: dict[BlockKey, int] = {}
        for key in self._changed:
            bits = Tier.GPU.value if key in self.pool else 0
            if key in self.cpu:
                bits |= Tier.CPU.value
            if key in self.ssd:
                bits |= Tier.SSD.value
            changed[key] = bits
        self._changed.clear()
        return changed

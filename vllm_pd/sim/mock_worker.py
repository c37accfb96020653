"""One mock worker: a modelled engine in real time, its KV events, and its place in the store."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from vllm_pd.agent.agent import Agent
from vllm_pd.agent.kv_event_source import EventEndpoints
from vllm_pd.agent.prefill_rules import budget_tokens
from vllm_pd.agent.prefill_runner import RunnerStats
from vllm_pd.agent.readiness import OwnServer
from vllm_pd.agent.spec import AgentSpec, PrefillSpec
from vllm_pd.background import end_tasks
from vllm_pd.block_hash import BlockHash, BlockHasher, Lora, extra_keys
from vllm_pd.connectors.handoff_arrivals import HandoffArrivals
from vllm_pd.errors import PDError
from vllm_pd.given_up import LEASE_END_FIELD
from vllm_pd.router.histogram import Series
from vllm_pd.settings import DEFAULT_LEASE_S
from vllm_pd.sim.engine import Engine
from vllm_pd.sim.live_engine import LiveEngine
from vllm_pd.sim.mock_counters import Counters
from vllm_pd.sim.mock_events import BlockContent, BlockEvents, EventPublisher
from vllm_pd.sim.mock_faults import Faults
from vllm_pd.sim.mock_holds import MockHolds
from vllm_pd.sim.mock_tokenizer import MockTokenizer
from vllm_pd.sim.timing import TimingModel
from vllm_pd.sim.work import EngineConfig, Work
from vllm_pd.state.base import Epoch, PoolSpec, Registry, Role, WorkerId, WorkerRecord
from vllm_pd.state.block_index import BlockIndex
from vllm_pd.state.prefill_queue import PrefillQueue
from vllm_pd.state.roles import Roles

logger = logging.getLogger(__name__)

ENGINE_VERSION = "mock"
_WITHDRAW_S = 2.0
HELD_S = 30.0
"""How long blocks wait for a decode worker, in the engine's seconds; vLLM's NIXL connector has the same lease."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MockConfig:
    """What mock workers are like. Sizes are in blocks."""

    model: str = "mock"
    loras: tuple[Lora, ...] = ()
    engine: EngineConfig = EngineConfig(gpu_blocks=8192, block_size=16)
    timing: TimingModel = TimingModel()
    speed: float = 1.0
    """How many of the engine's seconds pass in one."""
    max_model_len: int = 32_768
    output_tokens: int = 64
    """Length of an answer that nothing limits."""
    store: str = ""
    namespace: str = "default"
    lease_s: float = DEFAULT_LEASE_S
    kv_events: bool = True
    claims: bool = True
    """Whether those that prefill take jobs from the store's prefill queue."""
    prefill_budget_tokens: int = 0
    """Of jobs claimed at a time; 0: twice the engine's batch."""
    grace_s: float = 1.0
    """How long jobs may go on when the worker is stopped."""
    seed: int = 0


class Generation:
    """One request in the engine, as its HTTP handler sees it."""

    def __init__(self, prompt: int, output: int, gaps: Series) -> None:
        self.prompt = prompt
        self.output = output
        self._gaps = gaps
        self._last = 0.0
        self.generated = 0
        self.finished = False
        self.work: Work | None = None
        self.on_fetched: Callable[[], None] | None = None
        self.held = False
        """Its blocks are kept for another worker, and given up by other means than its end."""
        self._changed = asyncio.Event()

    def progress(self, generated: int, finished: bool) -> None:
        if generated != self.generated or finished:
            self._note_gap(generated - self.generated)
            self.generated = generated
            self.finished = finished
            self._changed.set()

    def _note_gap(self, tokens: int) -> None:
        """Tokens that come together share the time since the ones before."""
        now = time.perf_counter()
        if self.generated and tokens > 0:
            self._gaps.observe((now - self._last) / tokens, tokens)
        self._last = now

    def fetched(self) -> None:
        if self.on_fetched is not None:
            self.on_fetched()

    async def more(self) -> int:
        """Wait for further tokens; returns how many there are now."""
        await self._changed.wait()
        self._changed.clear()
        return self.generated


class MockWorker:
    """Made, used and stopped in one loop.

    Args:
        url: where its API is.
        tokenizer: may be shared by many workers.
        context: where its event sockets are made; None: it publishes no KV events.
    """

    def __init__(
        self,
        config: MockConfig,
        url: str,
        role: Role,
        tokenizer: MockTokenizer,
        context: zmq.Context[zmq.Socket[bytes]] | None,
    ) -> None:
        self.config = config
        self.url = url
        self._first_role = role
        self.tokenizer = tokenizer
        self.faults = Faults()
        self.counters = Counters()
        self.engine_id = str(uuid.uuid4())
        self.dead = False
        size = config.engine.block_size
        self.live = LiveEngine(Engine(config.engine, config.timing), config.speed, self._changed, self._report)
        self._hasher = BlockHasher(size)
        self._events = BlockEvents(size)
        self._leaving: list[Work] = []
        """Aborted, but the step in progress may yet store some of their blocks."""
        self._publisher = EventPublisher(context, seed=config.seed) if context is not None else None
        self.holds = MockHolds(self.live.release)
        self.arrivals = HandoffArrivals()
        self._agent: Agent | None = None
        self._agent_task: asyncio.Task[None] | None = None

    @property
    def role(self) -> Role:
        """What it does now."""
        return self._agent.role if self._agent is not None else self._first_role

    # Requests.

    def start(
        self,
        ids: Sequence[int],
        output: int,
        *,
        lora: Lora | None = None,
        salt: str | None = None,
        remote: bool = False,
        hold: bool = False,
        priority: int = 0,
        told: int = 0,
    ) -> Generation:
        """Hand a request to the engine. The answer goes on behind the first `told` tokens of the story.

        Raises:
            ValueError: a salt cannot be hashed.
        """
        everything = [*ids, *self.tokenizer.answer(output, told)]
        extra = extra_keys(lora, salt) if lora is not None or salt else None
        blocks = self._hasher.chain(everything, extra)
        if self._publisher is not None:
            self._describe(blocks, everything, lora)
        generation = Generation(len(ids), output, self.counters.itl)
        work = generation.work = Work(generation, len(ids), output, blocks, remote=remote, hold=hold, priority=priority)
        self.counters.requests += 1
        self.live.submit(work)
        return generation

    def end(self, generation: Generation, first_token_s: float | None) -> None:
        """A request's handler is done with it, finished or not."""
        work, counters = generation.work, self.counters
        assert work is not None
        aborted = not generation.finished and not self.dead
        if aborted:
            self._leaving.append(work)
            self.live.abort(work)
            counters.aborted += 1
        counters.finished += generation.finished
        counters.generation_tokens += generation.generated
        if first_token_s is not None:
            size = self.config.engine.block_size
            counters.prompt_tokens += work.prompt
            counters.queries += work.prompt
            counters.hits += work.gpu_hits * size
            counters.cpu_hits += work.cpu_hits * size
            counters.ssd_hits += work.ssd_hits * size
            counters.external_hits += work.cached - work.gpu_hits * size
            counters.ttft.observe(first_token_s)
        if work.hold and generation.finished and not generation.held:
            self.live.release(work)
        if not aborted:
            self._events.forget(work.keys)

    # Blocks for other workers.

    def hold(self, request_id: str, generation: Generation, key: str) -> Mapping[str, Any]:
        """Keep a finished request's blocks for another worker; returns what that one must be told.

        Args:
            key: the router's name for them, to let them go; empty for none.
        """
        work = generation.work
        assert work is not None
        generation.held = True
        blocks = list(work.blocks)
        held_s = HELD_S / self.config.speed
        name = self.holds.add(request_id, work, key, held_s)
        host, _, port = self.url.rpartition("//")[2].rpartition(":")
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [blocks],
            "remote_engine_id": self.engine_id,
            "remote_request_id": name,
            "remote_host": host,
            "remote_port": int(port),
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": work.prompt,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "read",
            LEASE_END_FIELD: int((time.time() + held_s) * 1000),
        }

    # The cache.

    @property
    def event_endpoints(self) -> EventEndpoints | None:
        """Where it publishes its KV events."""
        return self._publisher.endpoints if self._publisher is not None else None

    @property
    def blocks(self) -> BlockEvents:
        """What it has said that it holds."""
        return self._events

    def _describe(self, blocks: Sequence[BlockHash], ids: Sequence[int], lora: Lora | None) -> None:
        size = self.config.engine.block_size
        parent: BlockHash | None = None
        for i, block in enumerate(blocks):
            content = BlockContent(parent, ids[i * size : (i + 1) * size], lora.name if lora else None)
            self._events.describe(block, content)
            parent = block

    def _changed(self, changed: Mapping[BlockHash, int]) -> None:
        if self._publisher is None or self.dead:
            self._leaving.clear()
            return
        self._publisher.drop = self.faults.drop_events
        self._publisher.drop_replay = self.faults.drop_replays
        events = self._events.events(changed)
        for work in self._leaving:
            self._events.forget(work.keys)
        self._leaving.clear()
        if events:
            self._publisher.publish(events)

    # The store.

    def register(self, registry: Registry, index: BlockIndex, queue: PrefillQueue, roles: Roles) -> None:
        """Begin to be in the store. What is given may be shared, and stays open."""
        config = self.config
        loras = config.loras
        address = self.url.rpartition("//")[2]
        host, _, port = address.rpartition(":")
        prefill = PrefillSpec(
            open_queue=lambda: _Shared(queue),
            server=OwnServer(host=host, port=int(port)),
            budget_tokens=budget_tokens(config.prefill_budget_tokens, config.engine.max_num_batched_tokens, 1),
            grace_s=config.grace_s,
        )
        record = WorkerRecord(
            id=WorkerId(address),
            epoch=Epoch(time.time_ns() // 1_000_000),
            pool=PoolSpec(
                model=config.model,
                revision="",
                dtype="bfloat16",
                kv_dtype="auto",
                kv_layout="",
                block_size=config.engine.block_size,
                hash_algo="sha256_cbor",
                engine=ENGINE_VERSION,
            ),
            url=self.url,
            role=self._first_role,
            models=(config.model, *(lora.name for lora in loras)),
            loras=tuple(lora.name for lora in loras),
            lora_paths=tuple(lora.path for lora in loras),
            engine_id=self.engine_id,
            nixl_host=host,
            nixl_port=int(port),
            claims=config.claims,
            kv_blocks=config.engine.gpu_blocks,
            max_model_len=config.max_model_len,
            by_priority=config.engine.scheduling_policy == "priority",
            versions={"vllm": ENGINE_VERSION},
        )
        endpoints = self.event_endpoints
        spec = AgentSpec(
            store=config.store,
            record=record,
            lease_s=config.lease_s,
            event_sources=lambda: {} if endpoints is None else {0: endpoints},
            load_tokenizer=lambda: self.tokenizer.files,
            prefill=prefill if config.claims else None,
        )
        agent = self._agent = Agent(
            spec,
            lambda: _Shared(registry),
            lambda: _Shared(index),
            _serves,
            lambda: _Shared(roles),
            self.counters.note_move,
        )
        self._agent_task = asyncio.create_task(self._run_agent(agent))
        self._report()

    async def _run_agent(self, agent: Agent) -> None:
        try:
            await agent.run()
        except PDError as e:
            logger.error("%s is not registered: %s", self.url, e)

    def _report(self) -> None:
        engine = self.live.engine
        if self._agent is not None and not self.dead:
            self._agent.observe(0, engine.running, engine.waiting, engine.kv_usage)

    @property
    def prefill_stats(self) -> RunnerStats | None:
        """What it has done of the prefill queue; None when it takes nothing from it."""
        return self._agent.prefill_stats if self._agent is not None else None

    # The end.

    def die(self) -> None:
        """As if killed: nothing is withdrawn, and the store hears no more. Idempotent."""
        self.dead = True
        self.live.close()
        if self._agent_task is not None:
            self._agent_task.cancel()

    async def withdraw(self) -> None:
        """Leave the store, as far as it answers. Idempotent."""
        if self._agent is None or self._agent_task is None:
            return
        self._agent.stop()
        await asyncio.wait((self._agent_task,), timeout=_WITHDRAW_S + self.config.grace_s)
        await end_tasks((self._agent_task,))

    def close(self) -> None:
        """Let go of everything else. Idempotent."""
        self.live.close()
        self.holds.close()
        if self._publisher is not None:
            self._publisher.close()


async def _serves() -> bool:
    return True


class _Shared:
    """A registry, an index, a queue or wishes that others use, too: closing it is not for one of them."""

    def __init__(self, shared: Any) -> None:
        self._shared = shared

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shared, name)

    async def close(self) -> None:
        """Nothing."""

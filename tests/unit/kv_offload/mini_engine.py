"""vLLM's scheduler over `PDConnector` and its CPU tier, with a model that knows what every byte of KV must be.

The KV of a token is a digest of all tokens up to it. Each step checks the KV of everything that the scheduler says is
computed, and then writes its own: a block that was reused while somebody still copied, a slot that was read before it
was written, or a hit on other tokens is an `AssertionError` at the first step that would have computed from it.

Copies are as late as they may be. A job of the worker runs some steps after it was submitted, or when the fence
(`wait`) asks for it; until then the blocks it loads into hold garbage. `SlowTier`, which stands for a disk, does
the same with host memory.
"""

from __future__ import annotations

import copy
import hashlib
import random
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.base import Medium, OffloadPolicy, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.unit.kv_offload.cache import caches
from tests.unit.kv_offload.remote_loads import RemoteLoads
from vllm_pd.connectors.pd_connector import PDConnector
from vllm_pd.kv_offload.load_rates import SSD_PRIOR, LoadRate
from vllm_pd.kv_offload.spec import PDOffloadingSpec, PDTieringOffloadingSpec
from vllm_pd.tier_choices import LoadGate
from vllm_pd.vllm_compat import (
    KVConnectorFactory,
    KVConnectorRole,
    KVTransferConfig,
    LookupResult,
    MultiKVConnectorStats,
    OffloadingSpecFactory,
    OffloadingWorker,
    TieringOffloadingSpec,
    TierJobResult,
)

BLOCK_TOKENS = 32
TOKEN_BYTES = 16
BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES
PAGE = 4096
"""A block of the tier takes whole pages."""
GARBAGE = 0x5A
MOST_STEPS = 5000
STEP_S, TOKEN_S = 1e-3, 1e-4


def digests(tokens: Sequence[int], known: list[bytes]) -> list[bytes]:
    """KV of each token, `known` grown to cover `tokens`."""
    while len(known) < len(tokens):
        before = known[-1] if known else b""
        known.append(hashlib.blake2b(before + tokens[len(known)].to_bytes(4, "big"), digest_size=TOKEN_BYTES).digest())
    return known


def answer(prompt: Sequence[int], length: int) -> list[int]:
    """What the model says after `prompt`."""
    known: list[bytes] = []
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(next_token(digests(tokens, known)[-1]))
    return tokens[len(prompt) :]


def next_token(kv: bytes) -> int:
    return int.from_bytes(kv[:2], "big") % 1000


def of_group(kv: bytes, group: int) -> bytes:
    """What the layers of a group keep for tokens of this KV."""
    return bytes(byte ^ 0xFF for byte in kv) if group else kv


class Delays:
    """How many steps things take; 0 unless the test says so."""

    def __init__(self) -> None:
        self.store: Callable[[], int] = lambda: 0
        self.load: Callable[[], int] = lambda: 0
        self.tier: Callable[[], int] = lambda: 0
        self.lost: Callable[[], bool] = lambda: False
        """Whether a block cannot be read from the tier."""
        self.early: Callable[[], bool] = lambda: False
        """Whether a read from the tier is over long before it is reported."""
        self.step = 0
        self.now = 0.0
        """Of a clock that tests may give to the connector."""


class LateWorker(OffloadingWorker):  # type: ignore[misc]
    """The real worker, but each job is begun as late as may be."""

    def __init__(self, worker: Any, blocks: torch.Tensor, delays: Delays) -> None:
        self.worker, self.blocks, self.delays = worker, blocks, delays
        self.held: dict[int, tuple[int, Callable[[], None]]] = {}
        self.loads: list[Any] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        due = self.delays.step + self.delays.store()
        self.held[job_id] = (due, lambda: self.worker.submit_store(job_id, src_spec, dst_spec))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self.loads.append(src_spec)
        for block in dst_spec.block_ids:
            self.blocks[int(block)].fill_(GARBAGE)
        due = self.delays.step + self.delays.load()
        self.held[job_id] = (due, lambda: self.worker.submit_load(job_id, src_spec, dst_spec))
        return True

    def begin(self, jobs: Iterable[int]) -> None:
        jobs = [job for job in jobs if job in self.held]
        for job in jobs:
            self.held.pop(job)[1]()
        self.worker.wait(set(jobs))

    def get_finished(self) -> list[Any]:
        self.begin([job for job, (due, _) in self.held.items() if due <= self.delays.step])
        return list(self.worker.get_finished())

    def wait(self, job_ids: set[int]) -> None:
        self.begin(job_ids)
        self.worker.wait(job_ids)

    def shutdown(self) -> None:
        self.begin(list(self.held))
        self.worker.shutdown()


class SlowTier(SecondaryTierManager):  # type: ignore[misc]
    """A tier in memory whose reads and writes happen as late as they are reported."""

    medium = Medium.STORAGE
    made: list[SlowTier] = []  # noqa: RUF012

    def __init__(self, *, delays: Delays, **options: Any) -> None:
        super().__init__(**options)
        self.delays, self.blocks = delays, dict[bytes, bytes]()
        self.jobs: dict[int, tuple[int, Any, bool]] = {}
        self.began: dict[int, tuple[float, int]] = {}
        self.early: set[int] = set()
        self.reads: list[bytes] = []
        self.load_rate = LoadRate(SSD_PRIOR)
        SlowTier.made.append(self)

    @property
    def queued_load_bytes(self) -> int:
        return sum(len(job.keys) * self.block_size_bytes for _, job, is_load in self.jobs.values() if is_load)

    def holds(self, key: bytes, req_context: Any) -> bool:
        return key in self.blocks

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        return LookupResult.HIT if key in self.blocks else LookupResult.MISS

    def submit_store(self, job_metadata: Any) -> None:
        self.jobs[job_metadata.job_id] = (self.delays.step + self.delays.tier(), job_metadata, False)

    def submit_load(self, job_metadata: Any) -> None:
        self.reads += job_metadata.keys
        self.began[job_metadata.job_id] = self.delays.now, self.queued_load_bytes
        if self.delays.early():
            self.early.add(job_metadata.job_id)
        for key, chunk in zip(job_metadata.keys, job_metadata.chunk_ids, strict=True):
            there = key in self.blocks and job_metadata.job_id in self.early
            self._row(chunk)[:] = self.blocks[key] if there else bytes([GARBAGE]) * self.block_size_bytes
        self.jobs[job_metadata.job_id] = (self.delays.step + self.delays.tier(), job_metadata, True)

    def get_finished_jobs(self) -> list[Any]:
        due = [job for job, (when, _, _) in self.jobs.items() if when <= self.delays.step]
        return [self._finish(*self.jobs.pop(job)[1:]) for job in due]

    def has_pending_work(self) -> bool:
        return bool(self.jobs)

    def on_new_request(self, req_context: Any) -> Any:
        return RequestOffloadingContext(policy=OffloadPolicy.CHUNK_LEVEL)

    def drain_jobs(self) -> None:
        self.jobs = {job: (0, meta, is_load) for job, (_, meta, is_load) in self.jobs.items()}

    def shutdown(self) -> None:
        self._primary_kv_view.release()

    def _row(self, chunk: Any) -> memoryview:
        start = int(chunk) * self.block_size_bytes
        return self._primary_kv_view.cast("B")[start : start + self.block_size_bytes]

    def _finish(self, job: Any, is_load: bool) -> Any:
        fine = []
        if is_load:
            began, queued = self.began.pop(job.job_id)
            self.load_rate.observe(len(job.keys) * self.block_size_bytes, self.delays.now - began, queued)
        for key, chunk in zip(job.keys, job.chunk_ids, strict=True):
            if not is_load:
                self.blocks[key] = bytes(self._row(chunk))
            elif self.delays.lost() or key not in self.blocks:
                self.blocks.pop(key, None)
                continue
            elif job.job_id not in self.early:
                self._row(chunk)[:] = self.blocks[key]
            fine.append(key)
        whole = len(fine) == len(job.keys)
        return TierJobResult(job_id=job.job_id, success=whole, successful_keys=None if whole else fine)


class MiniSpec(PDOffloadingSpec):
    """Host memory alone."""


class MiniTieringSpec(PDTieringOffloadingSpec):
    """Host memory over a `SlowTier`."""

    def __init__(self, config: Any) -> None:
        TieringOffloadingSpec.__init__(self, config)


class MiniEngine:
    """One engine, step by step.

    Args:
        model: folder of the tiny model, for its configuration alone.
        gpu_blocks: of the KV cache; one is never used.
        cpu_blocks: of the tier.
        below: whether a `SlowTier` is under it, or the configuration of another tier that is.
        mode: of the cost gate.
        window: tokens that further layers see, which form a second KV group, in blocks of the same memory; their KV
            is the digest with all bits turned over.
        remote: whether `RemoteLoads` is beside the tiers.
    """

    def __init__(
        self,
        model: Path,
        *,
        gpu_blocks: int,
        cpu_blocks: int,
        below: bool | dict[str, Any] = False,
        mode: LoadGate = LoadGate.ALWAYS,
        window: int | None = None,
        remote: bool = False,
    ) -> None:
        self.delays, self.model, self.window = Delays(), model, window
        if "RemoteLoads" not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector("RemoteLoads", RemoteLoads.__module__, "RemoteLoads")
        for name in ("MiniSpec", "MiniTieringSpec"):
            if name not in OffloadingSpecFactory._registry:
                OffloadingSpecFactory.register_spec(name, __name__, name)
        tiers: dict[str, Any] = {"spec_name": "MiniSpec", "cpu_bytes_to_use": cpu_blocks * PAGE, "load_gate": str(mode)}
        if below:
            tiers["spec_name"] = "MiniTieringSpec"
            slow = {"type": "SlowTier", "module_path": __name__, "delays": self.delays}
            tiers["secondary_tiers"] = [slow if below is True else below]
        child = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": tiers}
        children = [{**child, "kv_connector": "RemoteLoads"}] if remote else []
        transfer = KVTransferConfig(
            kv_connector="pd",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"connectors": [*children, child]},
        )
        self.config = EngineArgs(
            model=str(model), max_num_batched_tokens=256, max_num_seqs=8, max_model_len=2048, block_size=BLOCK_TOKENS,
            enable_prefix_caching=True, prefix_caching_hash_algo="sha256_cbor", async_scheduling=False,
        ).create_engine_config()  # fmt: skip
        self.config.cache_config.num_gpu_blocks = gpu_blocks
        self.config.kv_transfer_config = transfer
        init_none_hash(sha256_cbor)
        self.hasher = get_request_block_hasher(BLOCK_TOKENS, sha256_cbor)
        shape: dict[str, Any] = {"block_size": BLOCK_TOKENS, "num_kv_heads": 1, "head_size": 4, "dtype": torch.float16}
        attention = FullAttentionSpec(**shape)
        assert attention.page_size_bytes == BLOCK_BYTES
        groups = [KVCacheGroupSpec(["layer.0"], attention)]
        if window is not None:
            groups.append(KVCacheGroupSpec(["layer.1"], SlidingWindowSpec(**shape, sliding_window=window)))
        size = gpu_blocks * BLOCK_BYTES
        # All of the same memory, as vLLM lays them out: a block is one group's at a time.
        tensors = [KVCacheTensor(size, list(group.layer_names), size, BLOCK_BYTES) for group in groups]
        self.kv_config = KVCacheConfig(num_blocks=gpu_blocks, kv_cache_tensors=tensors, kv_cache_groups=groups)
        self.scheduler = Scheduler(
            self.config, self.kv_config, StructuredOutputManager(self.config), block_size=BLOCK_TOKENS, log_stats=True
        )
        self.connector: PDConnector = self.scheduler.connector
        self.tier = SlowTier.made[-1] if below is True else None
        self.blocks = torch.full((gpu_blocks, BLOCK_BYTES), GARBAGE, dtype=torch.uint8).view(torch.int8)
        self.half = PDConnector(self.config, KVConnectorRole.WORKER, self.kv_config)
        tiers_half = self.half.sub_connectors[-1].connector_worker
        inner = tiers_half.spec.get_worker(caches([self.blocks], [[(0, BLOCK_BYTES)] for _ in groups]))
        self.worker = tiers_half.worker = LateWorker(inner, self.blocks.view(torch.uint8), self.delays)
        if remote:
            self.half.sub_connectors[0].write = self._write
        self.tables: dict[str, list[list[int]]] = {}
        """Blocks of each request, by group."""
        self.known: dict[str, list[bytes]] = {}
        self.answers: dict[str, list[int]] = {}
        self.preemptions = self.computed = 0
        self.counted = MultiKVConnectorStats()
        take = self.connector.get_kv_connector_stats

        def counting() -> Any:
            stats = take()
            if stats is not None:
                self.counted.aggregate(copy.deepcopy(stats))
            return stats

        self.connector.get_kv_connector_stats = counting  # type: ignore[method-assign]

    def ask(self, name: str, prompt: Sequence[int], length: int = 4, **params: Any) -> None:
        sampling = SamplingParams(max_tokens=length, ignore_eos=True, temperature=0.0, extra_args=params or None)
        request = Request(name, list(prompt), sampling, None, block_hasher=self.hasher)
        self.answers[name], self.known[name] = [], []
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self) -> Any:
        self.delays.step += 1
        before = self.computed
        output = self.scheduler.schedule()
        meta = output.kv_connector_metadata
        self.preemptions += len(output.preempted_req_ids or ())
        self.half.handle_preemptions(meta)
        self.half.bind_connector_metadata(meta)
        sampled = self._compute(output)
        self.delays.now += STEP_S + TOKEN_S * (self.computed - before)
        self.half.start_load_kv(None)
        self.half.wait_for_save()
        results = self.half.get_transfer_results(output.finished_req_ids)
        told = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            kv_connector_worker_meta=self.half.build_connector_worker_meta(),
        )
        self.half.clear_connector_metadata()
        names = list(output.num_scheduled_tokens)
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: i for i, name in enumerate(names)},
                sampled_token_ids=[sampled[name] for name in names],
                kv_connector_output=told,
            ),
        )
        return output

    def run(self, until: Callable[[], bool] | None = None) -> None:
        """Step until all requests have ended and all copies too, or until the condition holds."""
        for _ in range(MOST_STEPS):
            if until() if until is not None else not self.scheduler.has_requests():
                return
            self.step()
        raise AssertionError(f"not done after {MOST_STEPS} steps")

    def reset(self, *, running: bool = False) -> bool:
        """What `POST /reset_prefix_cache?reset_external=true` does."""
        return bool(self.scheduler.reset_prefix_cache(reset_running_requests=running, reset_connector=True))

    def stop(self) -> None:
        """As an engine ends: the scheduler's half, while the worker's may still copy."""
        self.scheduler.shutdown()
        self.half.shutdown()

    def _compute(self, output: Any) -> dict[str, list[int]]:
        started = {new.req_id: (new.num_computed_tokens, new.block_ids) for new in output.scheduled_new_reqs}
        for name, (_, blocks) in started.items():
            self.tables[name] = [list(group) for group in blocks]
        computed = {name: count for name, (count, _) in started.items()}
        cached = output.scheduled_cached_reqs
        for name, blocks, count in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            computed[name] = count
            if name in cached.resumed_req_ids:
                self.tables[name] = [[] for _ in self.tables[name]]
            for table, more in zip(self.tables[name], blocks or (), strict=False):
                table += more
        sampled: dict[str, list[int]] = {}
        for name, count in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            tokens = list(request.all_token_ids)
            kv, start = digests(tokens, self.known[name]), computed[name]
            self._check(name, kv, start)
            self._put(kv, range(start, start + count), self.tables[name])
            self.computed += count
            sampled[name] = []
            if start + count == len(tokens):
                sampled[name] = [next_token(kv[-1])]
                self.answers[name] += sampled[name]
        return sampled

    def _write(self, tokens: list[int], blocks: list[list[int]]) -> None:
        """All KV of `tokens`, into the blocks of each group that are not skipped."""
        self._put(digests(tokens, []), range(len(tokens)), blocks)

    def _put(self, kv: list[bytes], positions: Iterable[int], blocks: list[list[int]]) -> None:
        for group, table in enumerate(blocks):
            for position in positions:
                if number := table[position // BLOCK_TOKENS]:
                    at = position % BLOCK_TOKENS * TOKEN_BYTES
                    own = torch.frombuffer(bytearray(of_group(kv[position], group)), dtype=torch.int8)
                    self.blocks[number][at : at + TOKEN_BYTES] = own

    def _check(self, name: str, kv: list[bytes], computed: int) -> None:
        """All KV that the scheduler counts as computed, and that the next token sees, is that of the request's own."""
        for group, table in enumerate(self.tables[name]):
            seen = 0 if not group or self.window is None else max(0, computed - self.window + 1)
            for number in range(seen // BLOCK_TOKENS, -(-computed // BLOCK_TOKENS)):
                first = max(seen, number * BLOCK_TOKENS)
                wanted = of_group(b"".join(kv[first : min(computed, (number + 1) * BLOCK_TOKENS)]), group)
                at = first % BLOCK_TOKENS * TOKEN_BYTES
                found = self.blocks[table[number]].numpy().tobytes()[at : at + len(wanted)]
                what = f"{name}: its block {number} of group {group}"
                assert found == wanted, f"{what} holds other KV at step {self.delays.step}"


def prompt(blocks: int, seed: int = 0) -> list[int]:
    """So many whole blocks and a few tokens."""
    chance = random.Random(seed)
    return [chance.randrange(1000) for _ in range(blocks * BLOCK_TOKENS + 5)]


def prompts(chance: random.Random, families: int, most_blocks: int) -> Callable[[], list[int]]:
    """Prompts that share beginnings of all lengths with others of their family."""
    stems = [[chance.randrange(1000) for _ in range(most_blocks * BLOCK_TOKENS)] for _ in range(families)]

    def draw() -> list[int]:
        stem = chance.choice(stems)
        kept = stem[: chance.randrange(1, len(stem))]
        return kept + [chance.randrange(1000) for _ in range(chance.randrange(1, 40))]

    return draw


def settle(engine: MiniEngine) -> None:
    """Let the copies that nobody waits for end."""
    deadline = time.monotonic() + 30
    while engine.scheduler.has_requests() or engine.connector.has_pending_push_work():
        assert time.monotonic() < deadline
        engine.step()

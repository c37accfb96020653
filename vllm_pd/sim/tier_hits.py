"""What of the prompts of a trace tiers of given sizes would have held: hit rates, without time. Pure.

One engine serves the trace, one request after the other. As in vLLM, a block hits only if every block before it does;
the GPU's cache is asked first, then host memory for what follows, then the SSD. What comes from a tier or is computed
goes to the GPU, and what is computed goes to host memory and SSD as well; what comes from the SSD goes to host memory.
Answers are left out: a trace does not say what is in them.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_pd.block_hash import BlockKey
from vllm_pd.kv_offload.policies import EvictionPolicy, Lru
from vllm_pd.sim.blocks import BlockPool, LowerTier
from vllm_pd.sim.trace import TraceRequest

STEP_TOKENS = 8192
"""Of a prompt computed, hence stored, at a time: vLLM's usual --max-num-batched-tokens."""


@dataclass(frozen=True, slots=True)
class Hits:
    """Blocks of prompts, and where they were found. A prompt that the GPU cannot hold is refused and is not in it."""

    blocks: int
    gpu: int
    cpu: int
    ssd: int
    refused: int = 0
    """Requests."""

    @property
    def rate(self) -> float:
        """Part of the blocks that need not be computed."""
        return (self.gpu + self.cpu + self.ssd) / self.blocks if self.blocks else 0.0

    def part(self, found: int) -> float:
        return found / self.blocks if self.blocks else 0.0


@dataclass(frozen=True, slots=True)
class Access:
    """A request as the tiers below the GPU see it.

    Attributes:
        keys: of the whole blocks of its prompt.
        gpu: how many leading ones the GPU has.
        usable: how many leading ones may be taken from a cache: the last token of a prompt is always computed.
    """

    keys: Sequence[BlockKey]
    gpu: int
    usable: int


@dataclass(frozen=True, slots=True)
class GpuPass:
    """The trace behind a GPU cache of one size. What is below the GPU changes nothing in it."""

    accesses: Sequence[Access]
    block_size: int
    refused: int

    @property
    def blocks(self) -> int:
        return sum(len(access.keys) for access in self.accesses)

    @property
    def gpu(self) -> int:
        return sum(access.gpu for access in self.accesses)


def behind_gpu(trace: Sequence[TraceRequest], gpu_blocks: int, block_size: int) -> GpuPass:
    """Run the trace through vLLM's GPU block pool."""
    pool = BlockPool(gpu_blocks, set())
    accesses: list[Access] = []
    refused = 0
    for request in trace:
        needed = -(-request.prompt // block_size)
        if needed > gpu_blocks:
            refused += 1
            continue
        usable = (request.prompt - 1) // block_size
        held = pool.hits(request.keys, usable)
        pool.take(held)
        blocks = held + pool.allocate(needed - len(held))
        for block, key in zip(blocks[len(held) :], request.keys[len(held) :], strict=False):
            pool.name(block, key)
        pool.release(blocks)
        accesses.append(Access(request.keys, len(held), usable))
    return GpuPass(accesses, block_size, refused)


def replay(run: GpuPass, policy: EvictionPolicy, ssd_blocks: int = 0) -> Hits:
    """Hits with a CPU tier from which `policy` evicts, and an SSD tier of `ssd_blocks`, least recently used first."""
    ssd = LowerTier(Lru(ssd_blocks), set())
    step = max(1, STEP_TOKENS // run.block_size)
    cpu_hits = ssd_hits = 0
    for access in run.accesses:
        from_cpu, from_ssd = _serve(access, policy, ssd, step)
        cpu_hits += from_cpu
        ssd_hits += from_ssd
    return Hits(run.blocks, run.gpu, cpu_hits, ssd_hits, run.refused)


def _serve(access: Access, policy: EvictionPolicy, ssd: LowerTier, step: int) -> tuple[int, int]:
    """One request; returns the hits on CPU and SSD."""
    keys, start = access.keys, access.gpu
    end = start
    reused: set[BlockKey] = set()
    for key in keys[start : access.usable]:
        if key in policy:
            reused.add(key)
        elif key not in ssd:
            break
        end += 1
    loaded = keys[start:end]
    promoted = [key for key in loaded if key not in reused]
    # vLLM offers to the tier what the GPU has as well, unless it loads: then only what follows the loaded blocks.
    first = end if loaded else 0
    steps = [promoted, *(keys[i : i + step] for i in range(first, len(keys), step))]
    for part in steps:
        new = [key for key in part if key not in policy]
        reused.update(set(part).difference(new))
        _store(policy, new, part)
    policy.accessed(keys[start:] if loaded else keys, reused, loaded)
    ssd.add(keys)
    return end - start - len(promoted), len(promoted)


def _store(policy: EvictionPolicy, new: Sequence[BlockKey], protected: Sequence[BlockKey]) -> None:
    """Keep new blocks, or none of them if there is no room beside the protected ones."""
    policy.missed(new)
    excess = len(policy) + len(new) - policy.capacity
    if excess > 0 and policy.evict(excess, protected) is None:
        return
    for key in new:
        policy.insert(key)
        policy.unpin(key)


def replay_optimal(run: GpuPass, capacity: int) -> Hits:
    """The most that any policy of a CPU tier of `capacity` blocks could reach, knowing the future.

    Belady's rule over what the GPU leaves to be found: of the blocks that the tier could hold after a request, those go
    whose next request needs them (beyond what the GPU has then) farthest in the future, of one request the last of its
    prompt first; a block that is never needed again is not kept. A block is needed no later than those that follow it
    in a prompt that needs both, so what is kept are whole beginnings, and every kept block counts: for blocks of equal
    size no other choice has more hits.
    """
    needs: defaultdict[BlockKey, deque[int]] = defaultdict(deque)
    for i, access in enumerate(run.accesses):
        for key in access.keys[access.gpu : access.usable]:
            needs[key].append(i)
    kept: dict[BlockKey, int] = {}
    farthest: list[tuple[int, int, BlockKey]] = []
    hits = 0
    for i, access in enumerate(run.accesses):
        for key in access.keys[access.gpu : access.usable]:
            if key not in kept:
                break
            hits += 1
        for depth, key in enumerate(access.keys):
            later = needs[key]
            while later and later[0] <= i:
                later.popleft()
            if not later:
                kept.pop(key, None)
                continue
            kept[key] = later[0]
            heapq.heappush(farthest, (-later[0], -depth, key))
        while len(kept) > capacity:
            need, _, key = heapq.heappop(farthest)
            if kept.get(key) == -need:
                del kept[key]
    return Hits(run.blocks, run.gpu, hits, 0, run.refused)


def distinct_blocks(trace: Sequence[TraceRequest]) -> int:
    """Different blocks in the prompts of a trace: a tier of that size never evicts."""
    return len({key for request in trace for key in request.keys})

"""The block index of a real worker: what the store says it holds is what its engine holds."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Sequence
from functools import partial

import pytest

from tests.e2e import prompts, wait
from tests.e2e.ask import Endpoint, Prompt
from tests.e2e.conftest import BLOCK, LEASE_S, MODEL
from vllm_pd.block_hash import KEY_BYTES, BlockHasher
from vllm_pd.graph.local import LocalCluster, LocalWorker
from vllm_pd.graph.metrics_text import Metrics
from vllm_pd.state import Holder, Role, Tier, WorkerState, open_block_index, open_registry

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SOON_S = 30.0
until = partial(wait.until, seconds=SOON_S)
KV_BLOCKS = 192
"""Of `tiny_cluster`; one of them is never used."""
Held = dict[bytes, int]


@pytest.fixture
def worker(cluster: LocalCluster) -> LocalWorker:
    """The one that decodes, with empty caches, in the engine and in the index."""
    (worker,) = cluster.of_role(Role.DECODE)
    until(lambda: is_registered(cluster), lambda: "the workers register")
    reset(worker, below=True)
    until(lambda: held(cluster) == {}, lambda: held(cluster))
    return worker


def states(cluster: LocalCluster) -> list[WorkerState]:
    async def read() -> list[WorkerState]:
        registry = open_registry(cluster.store_url, cluster.namespace, timeout_s=5.0)
        try:
            return list((await registry.snapshot()).workers)
        finally:
            await registry.close()

    return asyncio.run(read())


def state_of(cluster: LocalCluster) -> WorkerState:
    (state,) = [state for state in states(cluster) if state.record.role is Role.DECODE]
    return state


def is_registered(cluster: LocalCluster, after: int = 0) -> bool:
    """Every worker of the cluster, and the one that decodes with a newer epoch than this."""
    try:
        return state_of(cluster).record.epoch > after and len(states(cluster)) == 2
    except ValueError:
        return False


def held(cluster: LocalCluster, state: WorkerState | None = None) -> Held | None:
    """Key -> tier bits of the worker's one engine, as the store has it; None when it has nothing of this start."""
    record = (state or state_of(cluster)).record

    async def read() -> Held | None:
        index = open_block_index(cluster.store_url, cluster.namespace, timeout_s=5.0)
        try:
            found = await index.held(record.pool.id, Holder(record.id, 0), record.epoch)
        finally:
            await index.close()
        if found is None:
            return None
        return {
            packed[at : at + KEY_BYTES]: bits
            for bits, packed in found.blocks.items()
            for at in range(0, len(packed), KEY_BYTES)
        }

    return asyncio.run(read())


def on(tier: Tier, blocks: Held | None) -> set[bytes]:
    return {key for key, bits in (blocks or {}).items() if bits & tier}


def reset(worker: LocalWorker, *, below: bool = False) -> None:
    """Reset the prefix cache, `below` with the tier in host memory. It is refused while copies are under way."""

    def done() -> bool:
        url = f"{worker.url}/reset_prefix_cache?reset_external={str(below).lower()}"
        with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=30) as answer:
            return b"true" in answer.read()

    until(done, lambda: "the cache is in use")


def texts(count: int, tokens: int, start: int = 0) -> list[list[int]]:
    """Prompts as token ids that differ from their first block on. The tiny model has more than 300 tokens."""
    return [[100 + (n * 31 + i * 7) % 200 if i else 10 + n for i in range(tokens)] for n in range(start, start + count)]


def ask(worker: LocalWorker, prompts: Sequence[list[int]]) -> None:
    endpoint = Endpoint(worker.url, MODEL)
    for n, ids in enumerate(prompts):
        endpoint.ask(Prompt(str(n), "completion", {"prompt": ids}, max_tokens=1))


def keys(*prompts: list[int]) -> set[bytes]:
    hasher = BlockHasher(BLOCK)
    return {key for ids in prompts for key in hasher.keys(ids)}


def hits(worker: LocalWorker) -> float:
    metrics: Metrics = worker.metrics()
    return metrics.value("vllm:prefix_cache_hits_total")


def test_the_index_has_the_blocks_of_every_prompt_and_no_other(cluster: LocalCluster, worker: LocalWorker) -> None:
    asked = texts(3, 4 * BLOCK + 5)
    text = Endpoint(worker.url, MODEL).token_ids(prompts.TEXTS["english"] * 3)
    shared = [*asked[0][: 2 * BLOCK], *text]
    ask(worker, [*asked, asked[0], text, shared])
    wanted = keys(*asked, text, shared)
    until(lambda: on(Tier.GPU, held(cluster)) == wanted, lambda: held(cluster))
    # Copies to host memory are done while the next steps run.
    extra = texts(1, 2 * BLOCK, start=50)[0]

    def copied() -> bool:
        ask(worker, [extra])
        return on(Tier.CPU, held(cluster)) >= wanted

    until(copied, lambda: held(cluster))
    assert set(held(cluster) or {}) == wanted | keys(extra)
    # What the worker says about itself agrees.
    shown = worker.metrics()
    until(
        lambda: worker.metrics().value("vllm_pd_agent_blocks", rank="0", tier="gpu") == len(wanted) + 2, lambda: shown
    )
    assert worker.metrics().value("vllm_pd_agent_kv_losses_total", rank="0") == 0


def test_evicted_blocks_leave_their_tier_and_hits_are_as_predicted(cluster: LocalCluster, worker: LocalWorker) -> None:
    asked = texts(30, 10 * BLOCK + 1)
    ask(worker, asked)
    until(lambda: on(Tier.GPU, held(cluster)) >= keys(asked[-1]), lambda: held(cluster))
    blocks = held(cluster)
    assert len(on(Tier.GPU, blocks)) < KV_BLOCKS
    assert on(Tier.GPU, blocks) <= keys(*asked)
    assert on(Tier.GPU, blocks).isdisjoint(keys(asked[0]))
    # Newest first: what is still there must be found before it is driven out.
    hasher = BlockHasher(BLOCK)
    for ids in reversed(asked[-12:]):
        gpu, before = on(Tier.GPU, held(cluster)), hits(worker)
        chain = hasher.keys(ids)
        predicted = next((n for n, key in enumerate(chain) if key not in gpu), len(chain)) * BLOCK
        ask(worker, [ids])
        assert abs(hits(worker) - before - predicted) <= BLOCK
        until(lambda chain=chain: on(Tier.GPU, held(cluster)) >= set(chain), lambda: held(cluster))  # type: ignore[misc]


def test_a_reset_takes_the_blocks_from_the_index_of_an_idle_worker(cluster: LocalCluster, worker: LocalWorker) -> None:
    asked = texts(2, 3 * BLOCK)
    ask(worker, asked)

    def copied() -> bool:
        ask(worker, asked)
        return on(Tier.CPU, held(cluster)) == keys(*asked)

    until(copied, lambda: held(cluster))
    reset(worker)
    until(lambda: on(Tier.GPU, held(cluster)) == set(), lambda: held(cluster))
    assert on(Tier.CPU, held(cluster)) == keys(*asked)
    reset(worker, below=True)
    until(lambda: held(cluster) == {}, lambda: held(cluster))
    ask(worker, asked[:1])
    until(lambda: on(Tier.GPU, held(cluster)) == keys(asked[0]), lambda: held(cluster))


def test_a_store_that_comes_back_empty_gets_the_whole_index_again(cluster: LocalCluster, worker: LocalWorker) -> None:
    asked = texts(2, 3 * BLOCK)
    ask(worker, asked)
    until(lambda: on(Tier.GPU, held(cluster)) == keys(*asked), lambda: held(cluster))
    assert cluster.store is not None
    cluster.store.kill()
    more = texts(1, 3 * BLOCK, start=60)
    ask(worker, more)
    cluster.store.start()

    until(lambda: is_registered(cluster), lambda: "the workers register again")
    until(lambda: on(Tier.GPU, held(cluster)) == keys(*asked, *more), lambda: held(cluster))


@pytest.mark.slow
def test_a_killed_worker_leaves_no_ghost_when_it_is_back(cluster: LocalCluster, worker: LocalWorker) -> None:
    ask(worker, texts(2, 3 * BLOCK))
    before = state_of(cluster)
    until(lambda: bool(held(cluster, before)), lambda: held(cluster, before))
    worker.process.kill()
    cluster.restart(worker)
    until(lambda: is_registered(cluster, after=before.record.epoch), lambda: "the worker registers again")
    asked = texts(1, 3 * BLOCK, start=70)
    ask(worker, asked)
    until(lambda: on(Tier.GPU, held(cluster)) == keys(*asked), lambda: held(cluster))
    until(lambda: held(cluster, before) is None, lambda: (held(cluster, before), LEASE_S))

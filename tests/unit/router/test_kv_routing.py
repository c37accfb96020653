"""Requests go where their prompt's KV is: a router on a real socket, fake workers, blocks in an index."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from aiohttp import web

from tests.unit.router.conftest import BLOCK, SPEC, Cluster, StartCluster, StartWorker, until
from tests.unit.router.fake_worker import FakeWorker, Seen, hang, status
from vllm_pd.background import end_tasks
from vllm_pd.block_hash import BlockHasher, BlockKey, Lora, extra_keys
from vllm_pd.router import prompt_reading
from vllm_pd.router.prompt_blocks import PromptBlocks, PromptHasher
from vllm_pd.router.prompt_reading import PromptReader
from vllm_pd.state import BlockIndex, Epoch, Holder, MemoryBlockIndex, MemoryRegistry, MemoryStore, Role, WorkerId

GPU, CPU, SSD = 1, 2, 4
TURNS = 6
PROMPT = [7 + n for n in range(BLOCK * TURNS + 5)]
OTHER = [9000 + n for n in range(BLOCK * TURNS + 5)]
PATH = "/v1/completions"


def keys(ids: list[int], lora: Lora | None = None) -> list[BlockKey]:
    return BlockHasher(BLOCK).keys(ids, extra_keys(lora) if lora else None)


def body(ids: list[int], **extra: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": ids, "max_tokens": 5, **extra}


async def announce(
    index: BlockIndex, worker: FakeWorker, held: Iterable[BlockKey], *, bits: int = GPU, rank: int = 0
) -> None:
    """All that one cache of `worker` holds from now on."""
    writer = index.writer(SPEC.id, Holder(WorkerId(worker.host_port), rank), Epoch(1000), 60_000)
    await writer.replace({bits: b"".join(held)})


@dataclass
class Pair:
    """Two workers that do both."""

    cluster: Cluster
    workers: tuple[FakeWorker, FakeWorker]

    async def holds(self, n: int, ids: list[int], *, bits: int = GPU, rank: int = 0) -> None:
        """Worker `n` holds the blocks of this prompt and no others; waits until the router knows it."""
        held = keys(ids)
        await announce(self.cluster.index, self.workers[n], held, bits=bits, rank=rank)
        holder = Holder(WorkerId(self.workers[n].host_port), rank)
        await until(lambda: self.known(holder) == len(held), "the router knows the blocks")

    def known(self, holder: Holder) -> int:
        assert self.cluster.service.watch is not None
        mirror = self.cluster.service.watch.mirror(SPEC.id)
        assert mirror is not None
        return mirror.prefixes.blocks(holder) if holder in mirror.prefixes else -1

    async def goes_to(self, ids: list[int], *, headers: dict[str, str] | None = None, **extra: Any) -> int:
        """Which worker answers, when nothing may be split."""
        before = [len(worker.posts) for worker in self.workers]
        code, _ = await self.cluster.post(PATH, body(ids, n=2, **extra), headers=headers or {})
        assert code == 200
        grown = [len(worker.posts) - count for worker, count in zip(self.workers, before, strict=True)]
        assert sorted(grown) == [0, 1]
        return grown.index(1)


async def start_pair(start_cluster: StartCluster, start_worker: StartWorker, **settings: Any) -> Pair:
    cluster = await start_cluster(**settings)
    workers = (await start_worker(), await start_worker())
    for worker in workers:
        await cluster.join(worker, Role.BOTH)
    return Pair(cluster, workers)


@pytest.fixture
async def pair(start_cluster: StartCluster, start_worker: StartWorker) -> Pair:
    return await start_pair(start_cluster, start_worker)


@pytest.mark.parametrize("n", [0, 1])
async def test_prompt_goes_where_its_blocks_are(pair: Pair, n: int) -> None:
    await pair.holds(n, PROMPT)
    assert [await pair.goes_to(PROMPT) for _ in range(4)] == [n] * 4


async def test_eviction_moves_the_next_turn(pair: Pair) -> None:
    await pair.holds(0, PROMPT)
    await pair.holds(1, PROMPT[: 2 * BLOCK])
    assert await pair.goes_to(PROMPT) == 0
    await pair.holds(0, PROMPT[:BLOCK])
    assert await pair.goes_to(PROMPT) == 1


async def test_blocks_on_the_gpu_go_before_blocks_that_must_be_loaded(pair: Pair) -> None:
    await pair.holds(0, PROMPT, bits=SSD)
    await pair.holds(1, PROMPT, bits=GPU)
    assert [await pair.goes_to(PROMPT) for _ in range(2)] == [1, 1]


async def test_requests_in_progress_count_at_once(pair: Pair) -> None:
    for worker in pair.workers:
        worker.hook = hang
    asks = [asyncio.create_task(pair.cluster.post(PATH, body([n] * 3000, n=2))) for n in range(10)]
    await until(lambda: sum(len(worker.posts) for worker in pair.workers) == 10, "all are sent")
    assert [len(worker.posts) for worker in pair.workers] == [5, 5]
    await end_tasks(asks)
    await until(lambda: pair.cluster.inflight() == 0, "nothing is in flight")


async def test_equal_prompts_that_come_together_go_together(pair: Pair) -> None:
    for worker in pair.workers:
        worker.hook = hang
    prompts = [[n] * 4000 for n in (5, 6) for _ in range(3)]
    asks = [asyncio.create_task(pair.cluster.post(PATH, body(ids, n=2, stream=True))) for ids in prompts]
    await until(lambda: sum(len(worker.posts) for worker in pair.workers) == 6, "all are sent")
    for worker in pair.workers:
        assert len({seen.json["prompt"][0] for seen in worker.posts}) == 1
    await end_tasks(asks)


async def test_worker_that_fails_is_left_out_and_the_prompt_goes_to_the_next_best(pair: Pair) -> None:
    await pair.holds(0, PROMPT)
    pair.workers[0].hook = status(503)
    assert (await pair.cluster.post(PATH, body(PROMPT, n=2)))[0] == 200
    assert [len(worker.posts) for worker in pair.workers] == [1, 1]
    assert pair.cluster.inflight() == 0


async def test_adapter_finds_its_own_blocks_only(start_cluster: StartCluster, start_worker: StartWorker) -> None:
    cluster = await start_cluster()
    workers = (await start_worker(models=("m", "tuned")), await start_worker(models=("m", "tuned")))
    for worker in workers:
        await cluster.join(worker, Role.BOTH, loras=("tuned",), lora_paths=("/adapters/tuned",))
    pair = Pair(cluster, workers)
    await pair.holds(0, PROMPT)
    tuned = keys(PROMPT, Lora("tuned", "/adapters/tuned"))
    await announce(cluster.index, workers[1], tuned)
    await until(lambda: pair.known(Holder(WorkerId(workers[1].host_port))) == len(tuned), "the router knows them")
    assert [await pair.goes_to(PROMPT) for _ in range(2)] == [0, 0]
    assert [await pair.goes_to(PROMPT, model="tuned") for _ in range(2)] == [1, 1]


async def test_request_without_a_model_is_one_for_the_base_model(pair: Pair) -> None:
    await pair.holds(1, PROMPT)
    assert [await pair.goes_to(PROMPT, model=None) for _ in range(2)] == [1, 1]


async def test_adapter_whose_path_is_not_known_claims_nothing(
    start_cluster: StartCluster, start_worker: StartWorker
) -> None:
    cluster = await start_cluster()
    worker = await start_worker(models=("m", "tuned"))
    await cluster.join(worker, Role.BOTH, loras=("tuned",))
    assert (await cluster.post(PATH, body(PROMPT, model="tuned")))[0] == 200
    assert cluster.metric("unknown_prompts_total", reason="unknown_model") == 1


async def test_adapter_that_workers_have_from_different_paths_claims_nothing(
    start_cluster: StartCluster, start_worker: StartWorker
) -> None:
    """The path is part of every hash, so what one worker would hold the other never does."""
    cluster = await start_cluster()
    for path in ("/one/tuned", "/other/tuned"):
        await cluster.join(await start_worker(models=("m", "tuned")), Role.BOTH, loras=("tuned",), lora_paths=(path,))
    assert (await cluster.post(PATH, body(PROMPT, model="tuned")))[0] == 200
    assert cluster.metric("unknown_prompts_total", reason="unknown_model") == 1


async def test_ids_that_no_tokenizer_has_are_for_the_worker_to_judge(pair: Pair) -> None:
    assert (await pair.cluster.post(PATH, body([2**70] * 100)))[0] == 200
    assert pair.cluster.metric("unknown_prompts_total", reason="unreadable") == 1


async def test_mistake_in_reading_a_prompt_costs_no_request(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def blocks(*args: Any, **options: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(PromptHasher, "blocks", blocks)
    assert (await pair.cluster.post(PATH, body(PROMPT)))[0] == 200
    assert pair.cluster.metric("unknown_prompts_total", reason="error") == 1
    assert "ZeroDivisionError" in caplog.text
    assert pair.cluster.inflight() == 0


@pytest.mark.parametrize(
    ("path", "role", "dtype", "expected"),
    [
        (PATH, Role.BOTH, "fp8", 200),
        (PATH, Role.PREFILL, "auto", 503),
        ("/v1/explain", Role.BOTH, "fp8", 200),
        ("/v1/explain", Role.PREFILL, "auto", 503),
    ],
)
async def test_worker_may_start_anew_as_another_while_a_prompt_is_read(
    start_cluster: StartCluster,
    start_worker: StartWorker,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    role: Role,
    dtype: str,
    expected: int,
) -> None:
    cluster, worker = await start_cluster(), await start_worker()
    await cluster.join(worker, Role.BOTH)
    read = PromptReader.read

    async def slowly(self: PromptReader, *args: Any) -> None:
        await read(self, *args)
        await cluster.join(worker, role, spec=replace(SPEC, kv_dtype=dtype), epoch=Epoch(2000))

    monkeypatch.setattr(PromptReader, "read", slowly)
    assert (await cluster.post(path, body(PROMPT)))[0] == expected
    assert cluster.inflight() == 0


@pytest.mark.parametrize("extra", [{"prompt_logprobs": 0}, {"echo": True, "logprobs": 1}])
async def test_prompt_that_is_computed_anew_whatever_is_cached_claims_nothing(
    pair: Pair, extra: dict[str, Any]
) -> None:
    await pair.holds(0, PROMPT)
    assert {await pair.goes_to(PROMPT, **extra) for _ in range(2)} == {0, 1}
    assert pair.cluster.metric("unknown_prompts_total", reason="prompt_logprobs") == 2


async def test_salted_prompt_finds_no_blocks_of_others(pair: Pair) -> None:
    await pair.holds(0, PROMPT)
    assert {await pair.goes_to(PROMPT, cache_salt="mine") for _ in range(2)} == {0, 1}


async def test_model_that_only_its_worker_may_know_claims_nothing(pair: Pair) -> None:
    await pair.holds(0, PROMPT)
    assert {await pair.goes_to(PROMPT, model="loaded-later") for _ in range(2)} == {0, 1}
    assert pair.cluster.metric("unknown_prompts_total", reason="unknown_model") == 2


async def test_each_rank_is_asked_for_by_a_header(start_cluster: StartCluster, start_worker: StartWorker) -> None:
    cluster = await start_cluster()
    workers = (await start_worker(), await start_worker())
    for worker in workers:
        await cluster.join(worker, Role.BOTH, dp_size=2)
    pair = Pair(cluster, workers)
    await pair.holds(1, PROMPT, rank=1)
    await pair.holds(0, OTHER, rank=0)
    assert await pair.goes_to(PROMPT) == 1
    assert await pair.goes_to(OTHER) == 0
    assert workers[1].posts[0].header("X-data-parallel-rank") == "1"
    assert workers[0].posts[0].header("X-data-parallel-rank") == "0"


async def test_worker_with_one_rank_gets_no_rank_header(pair: Pair) -> None:
    await pair.goes_to(PROMPT)
    assert all(seen.header("X-data-parallel-rank") is None for worker in pair.workers for seen in worker.posts)


async def test_session_stays_on_its_worker(pair: Pair) -> None:
    first = await pair.goes_to(PROMPT, headers={"X-VLLM-PD-Session": "s"})
    again = [await pair.goes_to([n] * 100, headers={"X-VLLM-PD-Session": "s"}) for n in range(4)]
    assert again == [first] * 4
    assert pair.cluster.metric("decisions_total", policy="predicted", reason="session") == 4


async def test_header_of_the_session_can_have_another_name(
    start_cluster: StartCluster, start_worker: StartWorker
) -> None:
    pair = await start_pair(start_cluster, start_worker, session_header="x-user")
    seen = [await pair.goes_to([n] * 100, headers={"X-User": "s"}) for n in range(4)]
    assert len(set(seen)) == 1


async def test_policy_and_temperature_of_one_request_go_before_the_settings(pair: Pair) -> None:
    await pair.holds(0, PROMPT)
    assert {await pair.goes_to(PROMPT, headers={"x-vllm-pd-policy": "round-robin"}) for _ in range(2)} == {0, 1}
    hot = [await pair.goes_to(PROMPT, headers={"x-vllm-pd-temperature": "1000"}) for _ in range(20)]
    assert set(hot) == {0, 1}


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({"x-vllm-pd-policy": "magic"}, "no policy 'magic'; choose one of predicted"),
        ({"x-vllm-pd-temperature": "hot"}, "must be a number from 0 to 1000, got 'hot'"),
        ({"x-vllm-pd-temperature": "-1"}, "must be a number from 0"),
        ({"x-vllm-pd-temperature": "nan"}, "must be a number from 0"),
    ],
)
async def test_override_that_cannot_be_used_is_refused(pair: Pair, headers: dict[str, str], words: str) -> None:
    code, answer = await pair.cluster.post(PATH, body(PROMPT), headers=headers)
    assert code == 400
    assert words in json.loads(answer)["error"]["message"]


async def test_overrides_can_be_switched_off(start_cluster: StartCluster, start_worker: StartWorker) -> None:
    pair = await start_pair(start_cluster, start_worker, allow_overrides=False)
    await pair.holds(0, PROMPT)
    assert [await pair.goes_to(PROMPT, headers={"x-vllm-pd-policy": "magic"}) for _ in range(2)] == [0, 0]


async def test_choices_drawn_with_a_seed_are_repeatable(start_cluster: StartCluster, start_worker: StartWorker) -> None:
    workers = (await start_worker(), await start_worker())
    seen = []
    for _ in range(2):
        cluster = await start_cluster(temperature=1000.0, seed=5)
        for worker in workers:
            await cluster.join(worker, Role.BOTH)
        pair = Pair(cluster, workers)
        await pair.holds(0, PROMPT)
        seen.append([await pair.goes_to(PROMPT) for _ in range(12)])
    assert seen[0] == seen[1]
    assert set(seen[0]) == {0, 1}


async def test_routers_of_one_store_know_of_each_others_work(
    start_cluster: StartCluster, start_worker: StartWorker
) -> None:
    shared = MemoryStore()
    one = await start_pair(start_cluster, start_worker, shared=shared)
    second = await start_cluster(shared=shared)
    await until(lambda: len(second.service.directory.workers) == 2, "the other router knows the workers")
    await one.holds(0, PROMPT)
    two = Pair(second, one.workers)
    one.workers[0].hook = hang
    long = asyncio.create_task(one.cluster.post(PATH, body(PROMPT + [1] * 20_000, n=2, stream=True)))
    await until(lambda: one.workers[0].posts, "a long prompt is being computed")
    busy = WorkerId(one.workers[0].host_port)
    await until(
        lambda: any(w.id == busy and w.engines[0].prefill_tokens for w in second.service.directory.workers),
        "the other router knows of it",
    )
    assert [await two.goes_to(PROMPT) for _ in range(3)] == [1, 1, 1]
    await end_tasks((long,))
    await until(lambda: not any(w.engines[0].prefill_tokens for w in second.service.directory.workers), "it is over")


async def pd_cluster(
    start_cluster: StartCluster, start_worker: StartWorker, **settings: Any
) -> tuple[Pair, tuple[FakeWorker, FakeWorker]]:
    """Two decode and two prefill workers."""
    cluster = await start_cluster(**settings)
    decoders, prefillers = [(await start_worker(), await start_worker()) for _ in range(2)]
    for worker in decoders:
        await cluster.join(worker, Role.DECODE)
    for worker in prefillers:
        await cluster.join(worker, Role.PREFILL)
    return Pair(cluster, decoders), prefillers


async def test_prefill_leg_goes_where_the_prompts_blocks_are(
    start_cluster: StartCluster, start_worker: StartWorker
) -> None:
    decode, prefillers = await pd_cluster(start_cluster, start_worker)
    await Pair(decode.cluster, prefillers).holds(1, PROMPT)
    for _ in range(3):
        assert (await decode.cluster.post(PATH, body(PROMPT)))[0] == 200
    assert [len(worker.posts) for worker in prefillers] == [0, 3]
    assert decode.cluster.metric("split_total") == 3
    assert decode.cluster.inflight() == 0


async def test_prompt_that_a_decode_worker_has_nearly_all_of_is_not_split(
    start_cluster: StartCluster, start_worker: StartWorker
) -> None:
    decode, prefillers = await pd_cluster(start_cluster, start_worker)
    await decode.holds(1, PROMPT)
    assert (await decode.cluster.post(PATH, body(PROMPT)))[0] == 200
    assert [len(worker.posts) for worker in (*decode.workers, *prefillers)] == [0, 1, 0, 0]
    assert decode.cluster.metric("bypass_total", reason="little_uncached") == 1


@pytest.mark.parametrize(("limit", "split"), [(2 * BLOCK, True), (3 * BLOCK, False)])
async def test_limit_of_local_prefill_decides_what_is_split(
    start_cluster: StartCluster, start_worker: StartWorker, limit: int, split: bool
) -> None:
    decode, prefillers = await pd_cluster(start_cluster, start_worker, max_local_prefill_tokens=limit)
    await decode.holds(0, PROMPT[: (TURNS - 2) * BLOCK])
    assert (await decode.cluster.post(PATH, body(PROMPT)))[0] == 200
    assert any(worker.posts for worker in prefillers) is split


async def test_without_an_index_nothing_is_looked_up(start_cluster: StartCluster, start_worker: StartWorker) -> None:
    pair = await start_pair(start_cluster, start_worker, index=False)
    assert pair.cluster.service.watch is None
    assert {await pair.goes_to(PROMPT) for _ in range(2)} == {0, 1}
    assert pair.cluster.metric("unknown_prompts_total", reason="no_index") == 2
    assert (await pair.cluster.get("/ready"))[0] == 200


async def test_prompt_that_takes_too_long_is_placed_without_a_claim(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pair.holds(0, PROMPT)
    release = asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow(*_: Any, **__: Any) -> PromptBlocks:
        asyncio.run_coroutine_threadsafe(release.wait(), loop).result(20)
        return PromptBlocks(len(PROMPT), keys(PROMPT))

    monkeypatch.setattr(PromptHasher, "cheap", lambda *_, **__: False)
    monkeypatch.setattr(PromptHasher, "blocks", slow)
    monkeypatch.setattr(prompt_reading, "DEADLINE_S", 0.05)
    try:
        assert {await pair.goes_to(PROMPT) for _ in range(2)} == {0, 1}
        assert pair.cluster.metric("unknown_prompts_total", reason="too_late") == 2
        monkeypatch.setattr(prompt_reading, "MAX_HASHING", 2)
        await pair.goes_to(PROMPT)
        assert pair.cluster.metric("unknown_prompts_total", reason="too_busy") == 1
    finally:
        release.set()


async def test_what_the_answers_say_of_cached_tokens_is_held_against_the_prediction(pair: Pair) -> None:
    usage = {"usage": {"prompt_tokens": len(PROMPT), "prompt_tokens_details": {"cached_tokens": (TURNS - 1) * BLOCK}}}

    async def answer(request: web.Request, seen: Seen) -> web.StreamResponse:
        if not seen.json.get("stream"):
            return web.json_response({"choices": [], **usage})
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        await reply.write(b'data: {"choices":[]}\n\n')
        await asyncio.sleep(0.01)
        await reply.write(b"data: " + json.dumps(usage).encode() + b"\n\ndata: [DONE]\n\n")
        return reply

    await pair.holds(0, PROMPT)
    pair.workers[0].hook = answer
    assert await pair.goes_to(PROMPT) == 0
    assert await pair.goes_to(PROMPT, stream=True) == 0
    assert pair.cluster.metric("cached_tokens_total", source="predicted") == 2 * TURNS * BLOCK
    assert pair.cluster.metric("cached_tokens_total", source="reported") == 2 * (TURNS - 1) * BLOCK
    assert pair.cluster.metric("overlap_error_blocks_bucket", le="-1.0") == 2
    assert pair.cluster.metric("overlap_error_blocks_bucket", le="-3.0") == 0
    assert pair.cluster.metric("ttft_prediction_error_seconds_bucket", le="+Inf") == 1
    page = (await pair.cluster.get("/metrics"))[1].decode()
    assert f'vllm_pd_router_index_blocks{{rank="0",tier="gpu",worker="{pair.workers[0].host_port}"}} {TURNS}.0' in page
    assert f'vllm_pd_router_index_loaded{{pool="{SPEC.id}"}} 1.0' in page


async def test_router_is_ready_once_its_index_is_loaded(
    start_cluster: StartCluster, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = asyncio.Event()
    held = MemoryBlockIndex.held

    async def late(self: MemoryBlockIndex, *args: Any) -> Any:
        await gate.wait()
        return await held(self, *args)

    monkeypatch.setattr(MemoryBlockIndex, "held", late)
    shared = MemoryStore()
    cluster = await start_cluster(shared=shared)
    eager = await start_cluster(shared=shared, serve_before_index=True)
    worker = await start_worker()
    joining = asyncio.create_task(cluster.join(worker, Role.BOTH))
    for each in (cluster, eager):
        await until(lambda each=each: each.service.directory.workers, "the worker is known")  # type: ignore[misc]
    code, answer = await cluster.get("/ready")
    assert code == 503
    assert "index is being loaded" in json.loads(answer)["reason"]
    # Who asks all the same is served, by load.
    assert (await cluster.post(PATH, body(PROMPT)))[0] == 200
    assert cluster.metric("unknown_prompts_total", reason="index_loading") == 1
    assert (await eager.get("/ready"))[0] == 200
    gate.set()
    await joining
    assert (await cluster.get("/ready"))[0] == 200


async def test_router_is_ready_once_its_tokenizers_are_loaded(
    start_cluster: StartCluster, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = asyncio.Event()
    get = MemoryRegistry.get_tokenizer

    async def late(self: MemoryRegistry, *args: Any) -> Any:
        await gate.wait()
        return await get(self, *args)

    monkeypatch.setattr(MemoryRegistry, "get_tokenizer", late)
    cluster = await start_cluster()
    await cluster.join(await start_worker(), Role.BOTH, tokenizer="0" * 64)
    code, answer = await cluster.get("/ready")
    assert code == 503
    assert "tokenizers are being loaded" in json.loads(answer)["reason"]
    gate.set()
    # It is not there: no reason to wait any longer.
    await until(lambda: not cluster.service._tokenizers.loading, "it was looked for")
    assert (await cluster.get("/ready"))[0] == 200

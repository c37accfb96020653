"""A mock worker answers, caches, publishes and hands over as a vLLM server does, and fails on demand."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.unit.sim.conftest import WAIT_S, Client, StartHost, until
from vllm_pd.block_hash import KEY_BYTES, Lora
from vllm_pd.router.decision import PromptKind
from vllm_pd.router.prompt_blocks import PromptHasher
from vllm_pd.router.request_fields import read_fields
from vllm_pd.sim.mock_tokenizer import MockTokenizer
from vllm_pd.sim.mock_worker import MockWorker
from vllm_pd.sim.samples import measure
from vllm_pd.sim.timing import fit
from vllm_pd.sim.work import EngineConfig
from vllm_pd.state import open_block_index, open_registry
from vllm_pd.state.base import MoveState, PoolSpec, Registry, Role, RoleMove, WorkerRecord, WorkerState
from vllm_pd.state.block_index import BlockIndex, Holder, Tier

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 4
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


def chat(*contents: str, **fields: object) -> dict[str, object]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)], **fields}


async def test_an_answer_is_the_same_streamed_and_whole(start_workers: StartHost, client: Client) -> None:
    (worker,) = await start_workers()
    for path, body in ((CHAT, chat(TEXT, max_tokens=30)), (COMPLETION, {"prompt": TEXT, "max_tokens": 30})):
        status, whole = await client.post(worker.url + path, body)
        assert status == 200
        choice = whole["choices"][0]
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        chunks = await client.chunks(worker.url + path, {**body, "stream_options": {"include_usage": True}})
        *parts, last = chunks
        said = [
            (c["choices"][0]["delta"].get("content", "") if path == CHAT else c["choices"][0]["text"]) for c in parts
        ]
        assert "".join(said) == text
        assert parts[-1]["choices"][0]["finish_reason"] == choice["finish_reason"] == "length"
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 30


async def test_an_answer_ends_by_itself_unless_it_is_told_not_to(start_workers: StartHost, client: Client) -> None:
    (worker,) = await start_workers(output_tokens=12)
    _, short = await client.post(worker.url + CHAT, chat("hi", max_tokens=40))
    _, long = await client.post(worker.url + CHAT, chat("hi", max_tokens=40, ignore_eos=True))
    assert (short["usage"]["completion_tokens"], short["choices"][0]["finish_reason"]) == (12, "stop")
    assert (long["usage"]["completion_tokens"], long["choices"][0]["finish_reason"]) == (40, "length")


async def test_the_next_turn_finds_all_whole_blocks_of_the_last_one(start_workers: StartHost, client: Client) -> None:
    (worker,) = await start_workers()
    _, first = await client.post(worker.url + CHAT, chat(TEXT, max_tokens=50))
    answer = first["choices"][0]["message"]["content"]
    _, second = await client.post(worker.url + CHAT, chat(TEXT, answer, "And then?", max_tokens=5))
    # The last token of an answer is not computed.
    computed = first["usage"]["total_tokens"] - 1
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == computed // 16 * 16


async def test_another_adapter_or_salt_finds_nothing(start_workers: StartHost, client: Client) -> None:
    (worker,) = await start_workers(loras=(Lora("adapter", "/adapter"),))
    await client.post(worker.url + CHAT, chat(TEXT, max_tokens=2))
    for fields in ({"model": "adapter"}, {"cache_salt": "pepper"}):
        _, reply = await client.post(worker.url + CHAT, chat(TEXT, max_tokens=2, **fields))
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_tokens_are_those_that_a_router_computes(
    start_workers: StartHost, client: Client, tokenizer: MockTokenizer
) -> None:
    (worker,) = await start_workers()
    body = chat("Grüße \U0001f44d", "ok", "次は？")
    _, reply = await client.post(f"{worker.url}/tokenize", body)
    fields = read_fields(json.dumps(body).encode())
    assert fields is not None
    spec = PoolSpec("mock", "", "", "", "", 1, "sha256_cbor", "")
    known = PromptHasher(spec, tokenizer.prompts).blocks(fields, PromptKind.CHAT)
    assert not known.why_unknown and reply["count"] == known.tokens == len(reply["tokens"])
    _, text = await client.post(f"{worker.url}/detokenize", {"tokens": reply["tokens"]})
    assert text["prompt"] == tokenizer.prompts.render(fields)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (CHAT, {"model": "other", "messages": []}, 404),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 9000}]}, 400),
        (CHAT, {}, 400),
        (COMPLETION, {"prompt": ["a", "b"]}, 400),
        (COMPLETION, {"prompt": "a", "n": 2}, 400),
        (COMPLETION, [1], 400),
    ],
)
async def test_what_it_cannot_serve_is_refused_as_vllm_does(
    start_workers: StartHost, client: Client, path: str, body: object, status: int
) -> None:
    (worker,) = await start_workers()
    found, reply = await client.post(worker.url + path, body)
    assert found == status and reply["error"]["code"] == status and reply["error"]["message"]


async def test_a_timing_model_can_be_fitted_to_a_worker(start_workers: StartHost) -> None:
    (worker,) = await start_workers(speed=5.0)
    prefills, steps = await asyncio.to_thread(measure, worker.url)
    assert [sample.cached > 0 for sample in prefills] == [False, True] * 5
    assert [sample.running for sample in steps] == [1] + [4] * 4 + [16] * 16
    found = fit(prefills, steps)
    assert found.whole_prefill(4000) > found.whole_prefill(10) > 0 and found.decode(0.0, 1) > 0


async def test_metrics_have_the_names_of_vllm(start_workers: StartHost, client: Client) -> None:
    (worker,) = await start_workers()
    _, page = await client.get(f"{worker.url}/metrics")
    assert 'vllm:cache_config_info{engine="0",model_name="mock",block_size="16"' in page
    assert "vllm:num_requests_running" in page


async def test_what_dashboards_ask_of_real_workers_mock_workers_tell_too(
    start_workers: StartHost, client: Client
) -> None:
    (worker,) = await start_workers()
    await client.chunks(worker.url + COMPLETION, {"model": "mock", "prompt": TEXT, "max_tokens": 5})
    worker.counters.note_move(RoleMove("m", Role.PREFILL, "planner", MoveState.DONE, 0, took_ms=1500))
    _, page = await client.get(f"{worker.url}/metrics")
    found = {
        (sample.name, sample.labels.get("le") or sample.labels.get("outcome") or sample.labels.get("source", "")): (
            sample.value
        )
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
    assert found["vllm:time_to_first_token_seconds_bucket", "+Inf"] == 1
    assert found["vllm:inter_token_latency_seconds_bucket", "+Inf"] == 4
    assert found["vllm:inter_token_latency_seconds_count", ""] == 4
    assert found["vllm:inter_token_latency_seconds_sum", ""] > 0
    assert found["vllm:prompt_tokens_cached_by_source_total", "device"] == 0
    assert found["vllm_pd_role_moves_total", "done"] == 1
    assert found["vllm_pd_role_moves_total", "undone"] == 0
    assert found["vllm_pd_role_move_seconds_bucket", "1.0"] == 0
    assert found["vllm_pd_role_move_seconds_bucket", "2.0"] == 1


async def test_a_worker_is_in_the_store_with_its_blocks_until_it_stops(
    start_workers: StartHost, client: Client, store_url: str
) -> None:
    workers = await start_workers(
        (Role.PREFILL, Role.DECODE), store=store_url, namespace="n1", engine=EngineConfig(48, 16, 128, 256)
    )
    registry, index = open_registry(store_url, "n1", timeout_s=10.0), open_block_index(store_url, "n1", timeout_s=10.0)
    try:
        records = {state.record.role: state.record for state in await _registered(registry, 2)}
        assert records.keys() == {Role.PREFILL, Role.DECODE}
        record = records[Role.PREFILL]
        files = await registry.get_tokenizer(record.pool.id, record.tokenizer)
        assert files == workers[0].tokenizer.files
        for i in range(12):
            await client.post(workers[0].url + CHAT, chat(f"{i} {TEXT}", max_tokens=3))
        truth = _held(workers[0])
        assert {Tier.GPU | Tier.CPU | Tier.SSD, Tier.SSD} <= set(truth.values())

        await _in_index(index, record, truth)
        for worker in workers:
            await worker.withdraw()
        assert (await registry.snapshot()).workers == ()
    finally:
        await registry.close()
        await index.close()


async def test_dropped_events_are_repaired_by_replay(start_workers: StartHost, client: Client, store_url: str) -> None:
    (worker,) = await start_workers(store=store_url, namespace="n2", engine=EngineConfig(64, 16))
    registry, index = open_registry(store_url, "n2", timeout_s=10.0), open_block_index(store_url, "n2", timeout_s=10.0)
    try:
        (state,) = await _registered(registry, 1)
        await client.post(f"{worker.url}/mock/faults", {"drop_events": 0.5})
        for i in range(20):
            await client.post(worker.url + CHAT, chat(f"{i} {TEXT}", max_tokens=3))
        await client.session.delete(f"{worker.url}/mock/faults")
        await client.post(worker.url + CHAT, chat(f"last {TEXT}", max_tokens=3))

        await _in_index(index, state.record, _held(worker))
    finally:
        await registry.close()
        await index.close()


async def test_a_prompt_is_prefilled_by_one_worker_and_decoded_by_another(
    start_workers: StartHost, client: Client
) -> None:
    prefill, decode = await start_workers((Role.PREFILL, Role.DECODE))
    _, first = await client.post(prefill.url + CHAT, chat(TEXT, max_tokens=1, kv_transfer_params=PREFILL))
    transfer = first["kv_transfer_params"]
    assert transfer["do_remote_prefill"] and transfer["remote_engine_id"] == prefill.engine_id
    assert len(transfer["remote_block_ids"][0]) == prefill.live.engine.pool.used > 0
    _, reply = await client.post(decode.url + CHAT, chat(TEXT, max_tokens=20, kv_transfer_params=transfer))
    usage = reply["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1
    await until(lambda: prefill.live.engine.pool.used == 0, "the prefill worker let go of the blocks")


@pytest.mark.parametrize("how", ["missing", "null", "garbage", "gone"])
async def test_a_wrong_prefill_answer_costs_a_prefill_and_no_block(
    start_workers: StartHost, client: Client, how: str
) -> None:
    prefill, decode = await start_workers((Role.PREFILL, Role.DECODE))
    await client.post(f"{prefill.url}/mock/faults", {"wrong_prefill": how})
    _, first = await client.post(prefill.url + CHAT, chat(TEXT, max_tokens=1, kv_transfer_params=PREFILL))
    assert prefill.live.engine.pool.used == 0
    transfer = first.get("kv_transfer_params")
    assert (transfer is None) == (how in ("missing", "null"))
    status, reply = await client.post(decode.url + CHAT, chat(TEXT, max_tokens=2, kv_transfer_params=transfer))
    assert status == 200 and reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_blocks_that_nobody_fetches_are_given_up(start_workers: StartHost, client: Client) -> None:
    (worker,) = await start_workers(speed=300.0)
    await client.post(worker.url + CHAT, chat(TEXT, max_tokens=1, kv_transfer_params=PREFILL))
    await until(lambda: worker.live.engine.pool.used == 0, "the lease of the blocks ended")


@pytest.mark.parametrize("early", [False, True], ids=["after", "before"])
async def test_a_router_lets_go_of_blocks_by_its_own_key(start_workers: StartHost, client: Client, early: bool) -> None:
    (worker,) = await start_workers()
    release = chat("x", max_tokens=1, kv_transfer_params={"pd_release": ["one", "unknown"]})
    if early:
        await client.post(worker.url + CHAT, release)
    for key in ("one", "two"):
        await client.post(worker.url + CHAT, chat(TEXT, max_tokens=1, kv_transfer_params={**PREFILL, "pd_hold": key}))
    used = worker.live.engine.pool.used
    if not early:
        await client.post(worker.url + CHAT, release)
    await client.post(worker.url + CHAT, chat("x", max_tokens=1, kv_transfer_params={"pd_release": ["two"]}))
    assert used > 0
    await until(lambda: worker.live.engine.pool.used == 0, "both were let go")


async def test_two_requests_of_one_name_hold_blocks_of_their_own(start_workers: StartHost, client: Client) -> None:
    (worker,) = await start_workers(speed=300.0)
    for _ in range(2):
        request = chat(TEXT, max_tokens=1, kv_transfer_params=PREFILL)
        async with client.session.post(worker.url + CHAT, json=request, headers={"X-Request-Id": "same"}) as reply:
            assert reply.status == 200
    await until(lambda: worker.live.engine.pool.used == 0, "the leases of both ended")


async def test_a_client_that_leaves_frees_its_place(start_workers: StartHost, client: Client) -> None:
    (worker,) = await start_workers(speed=1.0)
    async with client.session.post(
        worker.url + CHAT, json=chat("hi", max_tokens=5000, ignore_eos=True, stream=True)
    ) as reply:
        await reply.content.readline()
        assert worker.live.engine.running == 1
    await until(lambda: worker.live.engine.idle, "the engine dropped the request")
    assert worker.live.engine.pool.used == 0 and worker.counters.aborted == 1


async def test_prompts_given_up_while_they_are_computed_stop_nothing(start_workers: StartHost, client: Client) -> None:
    (worker,) = await start_workers(speed=0.05)
    asked = asyncio.create_task(client.post(worker.url + CHAT, chat(TEXT, max_tokens=2)))
    await until(lambda: worker.live.engine.running == 1, "the prompt is being computed")
    asked.cancel()
    await until(lambda: worker.counters.aborted == 1 and worker.live.engine.idle, "the engine dropped the request")
    status, reply = await client.post(worker.url + CHAT, chat(TEXT, max_tokens=2))
    # What was computed of the one that was given up is in the cache.
    assert status == 200 and reply["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_the_cache_can_be_reset(start_workers: StartHost, client: Client) -> None:
    (worker,) = await start_workers()
    await client.post(worker.url + CHAT, chat(TEXT, max_tokens=2))
    assert worker.blocks.count(Tier.GPU) > 0
    status, _ = await client.post(f"{worker.url}/reset_prefix_cache", {})
    assert status == 200 and worker.blocks.count(Tier.GPU) == 0


async def test_status_faults_end_after_the_given_requests(start_workers: StartHost, client: Client) -> None:
    (worker,) = await start_workers()
    await client.post(f"{worker.url}/mock/faults", {"status": 503, "times": 2})
    found = []
    for _ in range(3):
        async with client.session.post(worker.url + CHAT, json=chat("hi", max_tokens=1)) as reply:
            found.append((reply.status, reply.headers.get("Retry-After")))
    assert found == [(503, "1"), (503, "1"), (200, None)]


async def test_a_hanging_worker_sends_nothing(start_workers: StartHost, client: Client) -> None:
    (worker,) = await start_workers()
    await client.post(f"{worker.url}/mock/faults", {"hang": True, "times": 1})
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await client.post(worker.url + CHAT, chat("hi", max_tokens=1))
    assert (await client.post(worker.url + CHAT, chat("hi", max_tokens=1)))[0] == 200


async def test_streams_stall_or_are_cut_in_the_middle(start_workers: StartHost, client: Client) -> None:
    (worker,) = await start_workers()
    await client.post(f"{worker.url}/mock/faults", {"cut_after": 3, "times": 1})
    with pytest.raises(aiohttp.ClientError):
        await client.chunks(worker.url + CHAT, chat("hi", max_tokens=10))
    await client.post(f"{worker.url}/mock/faults", {"stall_after": 3, "times": 1})
    async with client.session.post(worker.url + COMPLETION, json={"prompt": "hi", "stream": True}) as reply:
        got = b""
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                while True:
                    got += await reply.content.readany()
    events = [json.loads(line[6:]) for line in got.decode().splitlines() if line]
    assert len("".join(event["choices"][0]["text"] for event in events)) == 3
    await until(lambda: worker.live.engine.idle, "the stalled request was dropped")


async def test_a_refusing_worker_comes_back_by_itself(start_workers: StartHost, client: Client) -> None:
    refusing, other = await start_workers((Role.BOTH, Role.BOTH))
    port = refusing.url.rpartition(":")[2]
    await client.post(f"{other.url}/mock/faults?worker={port}", {"refuse": 0.3})

    async def refuses() -> bool:
        try:
            return (await client.get(f"{refusing.url}/health"))[0] != 200
        except aiohttp.ClientError:
            return True

    async with asyncio.timeout(WAIT_S):
        for expected in (True, False):
            while await refuses() != expected:  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0.01)
    assert (await client.get(f"{other.url}/health"))[0] == 200


async def test_a_dead_worker_is_gone_from_the_network_at_once_and_from_the_store_with_its_lease(
    start_workers: StartHost, client: Client, store_url: str
) -> None:
    dying, other = await start_workers((Role.BOTH, Role.BOTH), store=store_url, namespace="n3", lease_s=1.0)
    registry = open_registry(store_url, "n3", timeout_s=10.0)
    try:
        await _registered(registry, 2)
        await client.post(f"{dying.url}/mock/faults", {"die": True})
        (left,) = await _registered(registry, 1)
        assert left.record.url == other.url
        with pytest.raises(aiohttp.ClientError):
            await client.get(f"{dying.url}/health")
    finally:
        await registry.close()


async def test_a_wrong_fault_is_refused_with_its_name(start_workers: StartHost, client: Client) -> None:
    (worker,) = await start_workers()
    for faults, message in (
        ({"explode": True}, "explode"),
        ({"status": 200}, "status"),
        ({"wrong_prefill": "x"}, "gone"),
    ):
        status, reply = await client.post(f"{worker.url}/mock/faults", faults)
        assert status == 400 and message in reply["error"]["message"]


def _held(worker: MockWorker) -> dict[bytes, int]:
    """What the engine itself holds."""
    engine = worker.live.engine
    bits: dict[bytes, int] = {}
    for tier, keys in (
        (Tier.GPU, engine.pool._cached),
        (Tier.CPU, engine.cpu._policy._home),
        (Tier.SSD, engine.ssd._policy._home),
    ):
        for key in keys:
            bits[key[:KEY_BYTES]] = bits.get(key[:KEY_BYTES], 0) | tier
    return bits


async def _in_index(index: BlockIndex, record: WorkerRecord, truth: dict[bytes, int]) -> None:
    """Wait until the index says the same of a worker."""
    known: dict[bytes, int] = {}
    try:
        async with asyncio.timeout(WAIT_S):
            while known != truth:
                await asyncio.sleep(0.02)
                held = await index.held(record.pool.id, Holder(record.id), record.epoch)
                known = {
                    packed[i : i + KEY_BYTES]: bits
                    for bits, packed in (held.blocks if held else {}).items()
                    for i in range(0, len(packed), KEY_BYTES)
                }
    except TimeoutError:
        raise AssertionError(f"{len(known.keys() ^ truth.keys())} blocks differ") from None


async def _registered(registry: Registry, count: int) -> list[WorkerState]:
    """Wait for so many workers."""
    async with asyncio.timeout(WAIT_S):
        while len(workers := (await registry.snapshot()).workers) != count:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return list(workers)


async def test_token_ids_are_told_where_they_are_asked_for_and_a_story_goes_on_behind_them(
    start_workers: StartHost, client: Client
) -> None:
    (worker,) = await start_workers()
    asked = {"prompt": TEXT, "max_tokens": 400, "return_token_ids": True, "ignore_eos": True}
    whole = [event["choices"][0] for event in await client.chunks(worker.url + COMPLETION, asked)]
    assert whole[0]["prompt_token_ids"] and not whole[1]["prompt_token_ids"]
    ids = [token for choice in whole for token in choice["token_ids"]]
    assert len(ids) == 400
    for kept in (1, 15, 300):
        prompt = [*whole[0]["prompt_token_ids"], *ids[:kept]]
        rest = await client.chunks(worker.url + COMPLETION, {**asked, "prompt": prompt, "max_tokens": 400 - kept})
        assert [token for event in rest for token in event["choices"][0]["token_ids"]] == ids[kept:]
    chatted = await client.chunks(worker.url + CHAT, chat(TEXT, max_tokens=4, return_token_ids=True))
    assert chatted[0]["prompt_token_ids"]
    assert [token for event in chatted[1:] for token in event["choices"][0]["token_ids"]] == ids[:4]

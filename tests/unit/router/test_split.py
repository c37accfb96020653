"""Requests through a router on a real socket to workers on real sockets: which legs go where, with which bytes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.unit.router.conftest import LONG, PD, SPEC, StartCluster, StartWorker
from tests.unit.router.fake_worker import TRANSFER
from vllm_pd.state import Role

COMPLETION = b'{"model": "m",  "prompt": "' + LONG.encode() + b'", "max_tokens": 20, "unknown": {"a": 1.50}}'
CHAT = json.dumps({"model": "m", "messages": [{"role": "user", "content": LONG}], "max_tokens": 20}).encode()


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)])
async def test_prompt_is_computed_on_one_worker_and_tokens_come_from_the_other(pd: PD, path: str, body: bytes) -> None:
    status, _ = await pd.cluster.post(path, body)
    assert status == 200
    (first,), (second,) = pd.prefill.posts, pd.decode.posts
    assert first.path == second.path == path
    assert first.json["max_tokens"] == 1
    assert first.json["stream"] is False
    assert first.json["kv_transfer_params"]["do_remote_decode"] is True
    assert second.json["kv_transfer_params"] == TRANSFER
    assert pd.cluster.metric("split_total") == 1
    assert pd.cluster.inflight() == 0


async def test_decode_leg_has_the_clients_own_bytes(pd: PD) -> None:
    await pd.cluster.post("/v1/completions", COMPLETION)
    assert pd.decode.posts[0].raw.endswith(COMPLETION[1:])


async def test_streamed_answer_of_a_split_request_is_the_decode_workers(pd: PD) -> None:
    body = json.dumps({"prompt": LONG, "stream": True, "stream_options": {"include_usage": True}, "min_tokens": 5})
    _, answer = await pd.cluster.post("/v1/completions", body.encode())
    assert answer == b'data: {"n":1}\n\ndata: {"n":2}\n\ndata: [DONE]\n\n'
    assert not {"stream_options", "min_tokens"} & pd.prefill.posts[0].json.keys()
    assert pd.decode.posts[0].json["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"n": 2}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"echo": True}, "echo"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"max_tokens": 1}, "one_token"),
        ({"use_beam_search": True}, "beam_search"),
        ({"prompt": [LONG, LONG]}, "prompt_batch"),
        ({"prompt": list(range(31))}, "short_prompt"),
        ({"prompt": "short"}, "short_prompt"),
        ({"kv_transfer_params": None}, "own_transfer_params"),
    ],
)
async def test_what_cannot_be_split_goes_whole_and_unchanged(pd: PD, extra: dict[str, object], reason: str) -> None:
    body = json.dumps({"prompt": LONG, "max_tokens": 20, **extra}).encode()
    assert (await pd.cluster.post("/v1/completions", body))[0] == 200
    assert pd.prefill.posts == []
    assert pd.decode.posts[0].raw == body
    assert pd.cluster.metric("bypass_total", reason=reason) == 1
    assert pd.cluster.metric("split_total") == 0


@pytest.mark.parametrize(("tokens", "split"), [(31, False), (32, True), (33, True)])
async def test_block_boundary_of_token_id_prompts(pd: PD, tokens: int, split: bool) -> None:
    await pd.cluster.post("/v1/completions", {"prompt": list(range(tokens)), "max_tokens": 9})
    assert len(pd.prefill.posts) == int(split)


async def test_endpoints_that_are_no_completions_go_whole(pd: PD) -> None:
    for path in ("/v1/embeddings", "/v1/responses", "/tokenize", "/v1/messages", "/pooling"):
        assert (await pd.cluster.post(path, {"input": LONG}))[0] == 200
    assert pd.prefill.posts == []
    assert len(pd.decode.posts) == 5
    assert pd.cluster.metric("bypass_total", reason="endpoint") == 5


async def test_worker_that_cannot_transfer_takes_no_part_in_a_split(
    start_cluster: StartCluster, start_worker: StartWorker
) -> None:
    cluster = await start_cluster()
    prefill, decode = await start_worker(), await start_worker()
    await cluster.join(prefill, Role.PREFILL)
    await cluster.join(decode, Role.DECODE, nixl_host="")
    assert (await cluster.post("/v1/completions", COMPLETION))[0] == 200
    assert prefill.posts == []
    assert cluster.metric("bypass_total", reason="no_transfer") == 1


async def test_without_a_prefill_worker_requests_go_whole(
    start_cluster: StartCluster, start_worker: StartWorker
) -> None:
    cluster = await start_cluster()
    worker = await start_worker()
    await cluster.join(worker, Role.BOTH)
    assert (await cluster.post("/v1/completions", COMPLETION))[0] == 200
    assert worker.posts[0].raw == COMPLETION
    assert cluster.metric("bypass_total", reason="no_prefill_worker") == 1


async def test_where_all_workers_do_both_a_request_is_not_handed_over_for_nothing(
    start_cluster: StartCluster, start_worker: StartWorker
) -> None:
    cluster = await start_cluster()
    one, two = await start_worker(), await start_worker()
    await cluster.join(one, Role.BOTH)
    await cluster.join(two, Role.BOTH)
    for _ in range(2):
        await cluster.post("/v1/completions", COMPLETION)
    assert [seen.raw for worker in (one, two) for seen in worker.posts] == [COMPLETION] * 2
    assert cluster.metric("bypass_total", reason="all_do_both") == 2


@pytest.mark.parametrize(("first", "second"), [(Role.PREFILL, Role.BOTH), (Role.BOTH, Role.DECODE)])
async def test_worker_for_both_takes_the_leg_that_the_other_does_not(
    start_cluster: StartCluster, start_worker: StartWorker, first: Role, second: Role
) -> None:
    cluster = await start_cluster(policy="least-loaded")
    one, two = await start_worker(), await start_worker()
    await cluster.join(one, first)
    await cluster.join(two, second)
    if Role.DECODE in (first, second):
        await cluster.load(one, running=5)
    await cluster.post("/v1/completions", COMPLETION)
    assert (len(one.posts), len(two.posts)) == (1, 1)


async def test_legs_stay_in_one_pool(start_cluster: StartCluster, start_worker: StartWorker) -> None:
    cluster = await start_cluster()
    prefill, decode, stranger = await start_worker(), await start_worker(), await start_worker()
    await cluster.join(prefill, Role.PREFILL)
    await cluster.join(decode, Role.DECODE)
    # Serves the same name, but its KV has another layout.
    await cluster.join(stranger, Role.PREFILL, spec=replace(SPEC, kv_dtype="fp8"))
    for _ in range(6):
        assert (await cluster.post("/v1/completions", COMPLETION))[0] == 200
    assert stranger.posts == []
    assert len(prefill.posts) == len(decode.posts) == 6


async def test_worker_of_another_model_is_never_chosen(start_cluster: StartCluster, start_worker: StartWorker) -> None:
    cluster = await start_cluster()
    mine, other = await start_worker(), await start_worker(models=("other",))
    await cluster.join(mine, Role.BOTH)
    await cluster.join(other, Role.BOTH, spec=replace(SPEC, model="other"))
    for _ in range(4):
        await cluster.post("/v1/completions", COMPLETION)
    assert other.posts == []
    status, answer = await cluster.post("/v1/completions", {"model": "nobody", "prompt": LONG})
    assert status == 404
    assert json.loads(answer)["error"]["message"] == (
        "The model 'nobody' does not exist; workers of this router serve m, other."
    )


async def test_unknown_model_with_one_pool_is_for_the_worker_to_judge(pd: PD) -> None:
    body = {"model": "adapter-loaded-at-run-time", "prompt": LONG, "max_tokens": 9}
    assert (await pd.cluster.post("/v1/completions", body))[0] == 200
    assert pd.decode.posts[0].json["model"] == "adapter-loaded-at-run-time"


async def test_least_loaded_worker_of_the_role_is_chosen(
    start_cluster: StartCluster, start_worker: StartWorker
) -> None:
    cluster = await start_cluster(policy="least-loaded")
    workers = [await start_worker() for _ in range(4)]
    for worker, role in zip(workers, (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE), strict=True):
        await cluster.join(worker, role)
    await cluster.load(workers[0], running=3, waiting=2)
    await cluster.load(workers[3], running=5)
    for _ in range(4):
        await cluster.post("/v1/completions", COMPLETION)
    assert [len(worker.posts) for worker in workers] == [0, 4, 4, 0]

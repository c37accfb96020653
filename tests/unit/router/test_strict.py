"""Which rule splits requests through a router on a real socket, and the strict mode that needs prefill workers."""

from __future__ import annotations

import json

import pytest

from tests.unit.router.conftest import LONG, SPEC, StartCluster, StartWorker, until
from tests.unit.router.fake_worker import status
from vllm_pd.errors import SettingsError
from vllm_pd.router import placement
from vllm_pd.router.settings import load
from vllm_pd.state import Role, WorkerId

PATH = "/v1/completions"
BODY = {"model": "m", "prompt": LONG, "max_tokens": 9}
STORE = {"store": "redis://h"}


async def test_strict_router_refuses_until_there_is_a_prefill_worker_and_again_when_there_is_none(
    start_cluster: StartCluster, start_worker: StartWorker
) -> None:
    cluster = await start_cluster(require_prefill=True)
    prefill, decode = await start_worker(), await start_worker()
    await cluster.join(decode, Role.DECODE)
    code, answer = await cluster.post(PATH, BODY)
    assert (code, json.loads(answer)["error"]["message"]) == (
        503,
        "No worker prefills for others; start one with --role prefill or --role both for the model 'm', or run the "
        "router without --require-prefill.",
    )
    code, answer = await cluster.get("/ready")
    assert code == 503
    assert "--require-prefill" in json.loads(answer)["reason"]
    joined = await cluster.join(prefill, Role.PREFILL)
    assert (await cluster.post(PATH, BODY))[0] == 200
    assert (await cluster.get("/ready"))[0] == 200
    await cluster.registry.withdraw(WorkerId(prefill.host_port), SPEC.id, joined.epoch)
    await until(lambda: len(cluster.service.directory.workers) == 1, "the prefill worker has left")
    assert (await cluster.post(PATH, BODY))[0] == 503
    assert len(prefill.posts) == len(decode.posts) == 1
    assert cluster.metric("refused_total", reason="no_prefill_worker") == 2
    assert cluster.inflight() == 0


async def test_strict_router_refuses_where_workers_cannot_hand_over(
    start_cluster: StartCluster, start_worker: StartWorker
) -> None:
    cluster = await start_cluster(require_prefill=True)
    await cluster.join(await start_worker(), Role.PREFILL, nixl_host="")
    await cluster.join(await start_worker(), Role.DECODE)
    code, answer = await cluster.post(PATH, BODY)
    assert code == 503
    assert "NIXL is off there" in json.loads(answer)["error"]["message"]
    assert cluster.metric("refused_total", reason="no_transfer") == 1


@pytest.mark.parametrize("extra", [{"n": 2}, {"max_tokens": 1}, {"prompt": "hi"}])
async def test_strict_router_serves_what_is_whole_by_its_own_nature(
    start_cluster: StartCluster, start_worker: StartWorker, extra: dict[str, object]
) -> None:
    cluster = await start_cluster(require_prefill=True)
    decode = await start_worker()
    await cluster.join(await start_worker(), Role.PREFILL)
    await cluster.join(decode, Role.DECODE)
    assert (await cluster.post(PATH, {**BODY, **extra}))[0] == 200
    assert len(decode.posts) == 1


async def test_strict_router_does_not_have_a_failed_prefill_done_by_the_decode_worker(
    start_cluster: StartCluster, start_worker: StartWorker
) -> None:
    cluster = await start_cluster(require_prefill=True)
    prefill, decode = await start_worker(), await start_worker()
    await cluster.join(prefill, Role.PREFILL)
    await cluster.join(decode, Role.DECODE)
    prefill.hook = status(500)
    code, answer = await cluster.post(PATH, BODY)
    assert code >= 500
    assert "--require-prefill" in json.loads(answer)["error"]["message"]
    assert decode.posts == []
    assert cluster.inflight() == 0
    assert cluster.metric("prefill_dispatch_total", way="direct", outcome="status_5xx") == 1
    assert cluster.metric("prefill_fallback_total", reason="status_5xx") == 0


@pytest.mark.parametrize("code", [429, 503])
async def test_strict_router_says_when_to_come_again_if_prefill_workers_are_too_busy(
    start_cluster: StartCluster, start_worker: StartWorker, code: int
) -> None:
    cluster = await start_cluster(require_prefill=True)
    prefill, decode = await start_worker(), await start_worker()
    await cluster.join(prefill, Role.PREFILL)
    await cluster.join(decode, Role.DECODE)
    prefill.hook = status(code)
    async with cluster.client.post(cluster.url + PATH, json=BODY) as answer:
        assert answer.status == 503
        assert answer.headers["Retry-After"] == "1"
        assert "too busy" in (await answer.json())["error"]["message"]
    assert decode.posts == []


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"disagg": "auto"}, "sooner_whole"),
        ({"disagg": "never"}, "never"),
        ({"disagg": "threshold", "max_local_prefill_tokens": 10_000}, "little_uncached"),
        ({"disagg": "dynamo-old"}, "little_uncached"),
        (
            {"disagg": "dynamo-old", "max_local_prefill_tokens": 10, "disagg_options": (("max_queue", 0.0),)},
            "prefill_busy",
        ),
        ({"disagg": "always"}, ""),
        ({"disagg": "threshold", "max_local_prefill_tokens": 10}, ""),
        ({"disagg": "dynamo-new"}, ""),
    ],
)
async def test_each_rule_is_obeyed_counted_and_explained(
    start_cluster: StartCluster, start_worker: StartWorker, settings: dict[str, object], reason: str
) -> None:
    cluster = await start_cluster(**settings)
    prefill, decode = await start_worker(), await start_worker()
    await cluster.join(prefill, Role.PREFILL)
    await cluster.join(decode, Role.DECODE)
    headers = {"Content-Type": "application/json", "x-vllm-pd-explain": "1"}
    async with cluster.client.post(cluster.url + PATH, json=BODY, headers=headers) as answer:
        assert answer.status == 200
        decision = json.loads(answer.headers["x-vllm-pd-decision"])
    assert (decision["rule"], decision["reason"]) == (settings["disagg"], reason or "split")
    assert ("here_ms" in decision) == (settings["disagg"] == "auto")
    assert (len(prefill.posts), len(decode.posts)) == (int(not reason), 1)
    if reason:
        assert cluster.metric("bypass_total", reason=reason) == 1
    else:
        assert cluster.metric("split_total") == 1


async def test_by_itself_a_router_splits_where_answers_would_stand_still(
    start_cluster: StartCluster, start_worker: StartWorker
) -> None:
    cluster = await start_cluster(disagg="auto")
    prefill, decode = await start_worker(), await start_worker()
    await cluster.join(prefill, Role.PREFILL)
    await cluster.join(decode, Role.DECODE)
    assert (await cluster.post(PATH, BODY))[0] == 200
    assert prefill.posts == []
    await cluster.load(decode, running=10)
    assert (await cluster.post(PATH, BODY))[0] == 200
    assert len(prefill.posts) == 1


async def test_header_names_the_rule_of_one_request(start_cluster: StartCluster, start_worker: StartWorker) -> None:
    cluster = await start_cluster(disagg="auto")
    prefill = await start_worker()
    await cluster.join(prefill, Role.PREFILL)
    await cluster.join(await start_worker(), Role.DECODE)
    assert (await cluster.post(PATH, BODY, headers={"x-vllm-pd-disagg": "always"}))[0] == 200
    assert len(prefill.posts) == 1
    assert (await cluster.post(PATH, BODY))[0] == 200
    assert len(prefill.posts) == 1
    code, answer = await cluster.post(PATH, BODY, headers={"x-vllm-pd-disagg": "alway"})
    assert (code, "did you mean 'always'" in json.loads(answer)["error"]["message"]) == (400, True)


async def test_hand_over_that_is_never_worth_it_is_tried_now_and_then(
    start_cluster: StartCluster, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "TRY_EVERY", 3)
    cluster = await start_cluster(disagg="auto")
    prefill = await start_worker()
    await cluster.join(prefill, Role.PREFILL)
    await cluster.join(await start_worker(), Role.DECODE)
    split = []
    for _ in range(7):
        # Asking where a request would go is not sending one.
        assert (await cluster.post("/v1/explain", BODY))[0] == 200
        assert (await cluster.post(PATH, BODY))[0] == 200
        split.append(len(prefill.posts))
    assert split == [0, 0, 1, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"disagg": "atuo"}, "did you mean 'auto'"),
        ({"disagg": "threshold"}, "needs its number of tokens"),
        ({"disagg_options": "stal=1"}, "did you mean 'stall'"),
        ({"disagg_options": "stall=-1"}, "values of at least 0"),
        ({"max_local_prefill_tokens": "-1"}, "at least 0, got '-1', or auto"),
        ({"disagg": "never", "require_prefill": True}, "contradict each other"),
    ],
)
def test_each_mistake_is_one_sentence_that_says_what_to_change(values: dict[str, object], words: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(flags={**STORE, **values})
    assert words in str(caught.value)


def test_settings_make_the_rule() -> None:
    rule = load(
        flags={**STORE, "max_local_prefill_tokens": "64", "disagg_options": ["stall=2", "max_wait=3"]}
    ).value.split_rule
    assert (rule.name, rule.max_local_tokens, rule.stall, rule.max_wait) == ("auto", 64, 2.0, 3.0)
    usual = load(flags={**STORE, "queue_timeout": 4}).value.split_rule
    assert (usual.max_local_tokens, usual.max_wait) == (0, 4.0)

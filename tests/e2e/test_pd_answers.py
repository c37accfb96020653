"""Prefill on one process, decode on another: the answers are those of one plain server, each side does its part."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from tests.e2e import prompts, wait
from tests.e2e.ask import Answer, Endpoint, Prompt, compare
from tests.e2e.conftest import BLOCK, MODEL
from vllm_pd.graph.local import LocalCluster, LocalWorker

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SETTLE_S = 40.0
"""Longer than the lease under which a prefill worker keeps blocks that nobody fetched."""
eventually = partial(wait.eventually, seconds=SETTLE_S)


@pytest.fixture(scope="module")
def all_prompts(plain: Endpoint) -> list[Prompt]:
    return prompts.build(plain)


@pytest.fixture(scope="module")
def wanted(plain: Endpoint, all_prompts: list[Prompt]) -> list[Answer]:
    return [plain.ask(prompt) for prompt in all_prompts]


def computed(worker: LocalWorker) -> float:
    """Prompt tokens this worker computed itself so far."""
    return worker.metrics().value("vllm:prompt_tokens_by_source_total", source="local_compute")


def kv_usage(worker: LocalWorker) -> float:
    return worker.metrics().value("vllm:kv_cache_usage_perc")


def check(wanted: list[Answer], got: list[Answer], all_prompts: list[Prompt], report: Callable[..., None]) -> None:
    verdicts = {p.name: compare(w, g) for p, w, g in zip(all_prompts, wanted, got, strict=True)}
    ties = {name: verdict.tie_at for name, verdict in verdicts.items() if verdict.tie_at is not None}
    equal = sum(verdict.equal for verdict in verdicts.values())
    report("equal", equal)
    report("parted at a tie", ties)
    print(f"\n{equal} of {len(verdicts)} answers equal, parted at a tie: {ties or 'none'}")
    wrong = {name: verdict.detail for name, verdict in verdicts.items() if verdict.detail}
    assert not wrong
    assert len(ties) <= 2, "so many ties hide errors; choose other prompts"


def test_answers_one_at_a_time_equal_a_plain_server_and_each_side_does_its_part(
    cluster: LocalCluster,
    through_router: Endpoint,
    all_prompts: list[Prompt],
    wanted: list[Answer],
    record_property: Callable[..., None],
) -> None:
    prefill, decode = cluster.worker("prefill-0"), cluster.worker("decode-0")
    idle = kv_usage(prefill)
    got, too_much, kept = [], {}, []
    for prompt in all_prompts:
        before = computed(decode)
        got.append(through_router.ask(prompt))
        if (own := computed(decode) - before) > BLOCK + 1:
            too_much[prompt.name] = own
        if not eventually(lambda: kv_usage(prefill) <= idle):
            kept.append(prompt.name)
    check(wanted, got, all_prompts, record_property)
    assert not too_much, "prompt tokens the decode worker computed itself"
    assert not kept, "requests whose blocks the prefill worker did not get back"
    moved = decode.metrics().value("vllm:nixl_bytes_transferred_sum")
    assert moved > 0


def test_eight_at_once_equal_a_plain_server(
    cluster: LocalCluster,
    through_router: Endpoint,
    all_prompts: list[Prompt],
    wanted: list[Answer],
    record_property: Callable[..., None],
) -> None:
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(through_router.ask, all_prompts))
    check(wanted, got, all_prompts, record_property)
    for worker in (cluster.worker("prefill-0"), cluster.worker("decode-0")):
        assert eventually(lambda w=worker: kv_usage(w) == 0.0), f"{worker.name} still holds blocks"


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2, "temperature": 0.7, "seed": 1},
        {"echo": True},
        {"prompt_logprobs": 1},
        {"max_tokens": 1},
        {"prompt": ["one prompt " * 20, "another prompt " * 20]},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_cannot_be_split_is_served_whole(
    fields: dict[str, object], cluster: LocalCluster, through_router: Endpoint, plain: Endpoint
) -> None:
    body = {"model": MODEL, "prompt": prompts.TEXTS["english"] * 2, "temperature": 0, "max_tokens": 8, **fields}
    before = computed(cluster.worker("prefill-0"))
    got = through_router.post("/v1/completions", body)
    assert [c["text"] for c in got["choices"]] == [c["text"] for c in plain.post("/v1/completions", body)["choices"]]
    assert computed(cluster.worker("prefill-0")) == before


def test_fields_that_would_break_the_prefill_leg_do_not(through_router: Endpoint, plain: Endpoint) -> None:
    body = {
        "model": MODEL, "messages": [{"role": "user", "content": prompts.TEXTS["english"]}], "temperature": 0,
        "max_tokens": 6, "min_tokens": 4, "stop": ["never said"], "stop_token_ids": [3], "logprobs": True,
        "top_logprobs": 3, "ignore_eos": True, "user": "somebody",
    }  # fmt: skip
    path = "/v1/chat/completions"
    assert through_router.post(path, body)["choices"][0]["message"] == plain.post(path, body)["choices"][0]["message"]


def test_a_repeated_long_prompt_comes_from_the_cache_of_the_prefill_worker(
    cluster: LocalCluster, through_router: Endpoint
) -> None:
    prefill = cluster.worker("prefill-0")
    prompt = Prompt("long", "completion", {"prompt": "A prompt that nobody has asked before. " * 60})
    before = computed(prefill)
    first = through_router.ask(prompt)
    once = computed(prefill) - before
    assert through_router.ask(prompt).text == first.text
    assert computed(prefill) - before - once <= BLOCK < once

"""A router whose prompts come out in another way than its workers' says so and stops claiming."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.router.conftest import SPEC, Cluster, StartCluster, StartWorker, until
from tests.unit.router.fake_worker import FakeWorker
from tests.unit.router.test_kv_routing import PROMPT, Pair, announce, keys
from vllm_pd.router import announcements, self_check, service
from vllm_pd.router.announcements import Announcements
from vllm_pd.router.model_folder import read_tokenizer_files
from vllm_pd.router.prompt_tokenizer import PromptTokenizer
from vllm_pd.router.request_fields import read_fields
from vllm_pd.state import Epoch, PoolSpec, Role, TokenizerFiles, WorkerId
from vllm_pd.state.block_index import Holder

Tokenize = Callable[[dict[str, Any]], list[int] | None]


@pytest.fixture
def files(tiny_model: Path) -> TokenizerFiles:
    return read_tokenizer_files(tiny_model)


_built: dict[str, PromptTokenizer] = {}


def like(files: TokenizerFiles) -> Tokenize:
    """`/tokenize` of a worker that has these files."""
    tokenizer = _built.get(files.sha) or _built.setdefault(files.sha, PromptTokenizer(files))

    def tokenize(request: dict[str, Any]) -> list[int]:
        if "messages" not in request:
            return tokenizer.encode(request["prompt"], add_special_tokens=True)
        fields = read_fields(json.dumps(request).encode())
        assert fields is not None
        return tokenizer.encode(tokenizer.render(fields), add_special_tokens=False)

    return tokenize


@dataclass
class Checked:
    """A cluster of one pool whose workers publish a tokenizer."""

    cluster: Cluster
    workers: list[FakeWorker]
    sha: str
    spec: PoolSpec

    @property
    def mismatch(self) -> float | None:
        registry = self.cluster.service.metrics.registry
        return registry.get_sample_value("vllm_pd_router_hash_mismatch", {"pool": self.spec.id})

    @property
    def announced(self) -> Announcements:
        found = self.cluster.service._announcements
        assert found is not None
        return found

    @property
    def missed(self) -> int:
        return sum(self.announced._misses.values())

    @property
    def watched(self) -> int:
        return len(self.announced._watched)

    async def join(self, n: int, **changes: Any) -> None:
        await self.cluster.join(self.workers[n], Role.BOTH, spec=self.spec, tokenizer=self.sha, **changes)


Start = Callable[..., Any]


@pytest.fixture
def start(
    start_cluster: StartCluster, start_worker: StartWorker, files: TokenizerFiles, monkeypatch: pytest.MonkeyPatch
) -> Start:
    monkeypatch.setattr(service, "CHECK_INTERVAL_S", 0.02)
    monkeypatch.setattr(self_check, "RETRY_S", 0.05)

    async def start(*tokenize: Tokenize | None, spec: PoolSpec = SPEC) -> Checked:
        cluster = await start_cluster()
        workers = [await start_worker() for _ in tokenize]
        for worker, answer in zip(workers, tokenize, strict=True):
            worker.tokenize = answer
        sha = await cluster.registry.put_tokenizer(spec.id, files, 60_000)
        checked = Checked(cluster, workers, sha, spec)
        for n in range(len(workers)):
            await checked.join(n)
        return checked

    return start


async def test_workers_that_tokenize_alike_are_looked_up(
    start: Start, files: TokenizerFiles, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    checked = await start(like(files), like(files))
    await until(lambda: caplog.text.count("tokenizes as this router does") == 2, "both were asked")
    assert checked.mismatch == 0.0
    text = {"model": "m", "prompt": "def f(x): return x", "max_tokens": 3}
    assert (await checked.cluster.post("/v1/completions", text))[0] == 200
    assert checked.cluster.metric("known_prompts_total") == 1


def drop_one(files: TokenizerFiles) -> Tokenize:
    same = like(files)
    return lambda request: (same(request) or [])[1:]


def change_one(files: TokenizerFiles) -> Tokenize:
    same = like(files)

    def tokenize(request: dict[str, Any]) -> list[int]:
        tokens = same(request) or []
        return [*tokens[:40], tokens[40] + 1, *tokens[41:]]

    return tokenize


def other_template(files: TokenizerFiles) -> Tokenize:
    return like(replace(files, chat_template="{% for m in messages %}{{ m.content }}{% endfor %}"))


@pytest.mark.parametrize(
    ("differs", "words"),
    [
        (drop_one, "a text has"),
        (change_one, "a text has other tokens after the first 32 on worker"),
        (other_template, "a chat has"),
    ],
)
async def test_worker_that_tokenizes_in_another_way_is_told_loudly(
    start: Start,
    files: TokenizerFiles,
    caplog: pytest.LogCaptureFixture,
    differs: Callable[[TokenizerFiles], Tokenize],
    words: str,
) -> None:
    checked = await start(like(files), differs(files))
    await until(lambda: checked.mismatch, "the mismatch is seen")
    (error,) = [entry for entry in caplog.records if entry.levelname == "ERROR"]
    assert words in error.message
    assert checked.workers[1].host_port in error.message
    assert "--tokenizer" in error.message
    # Its pool is routed by load, and that is counted too.
    pair = Pair(checked.cluster, (checked.workers[0], checked.workers[1]))
    await pair.holds(0, PROMPT)
    assert {await pair.goes_to(PROMPT) for _ in range(2)} == {0, 1}
    assert checked.cluster.metric("unknown_prompts_total", reason="hash_mismatch") == 2


async def test_pool_is_looked_up_again_after_the_worker_was_started_anew(start: Start, files: TokenizerFiles) -> None:
    checked = await start(drop_one(files))
    await until(lambda: checked.mismatch, "the mismatch is seen")
    checked.workers[0].tokenize = like(files)
    await checked.join(0, epoch=Epoch(2000))
    await until(lambda: checked.mismatch == 0.0, "it is checked again")


async def test_workers_that_hash_in_a_way_nobody_can_repeat_are_told_too(
    start: Start, files: TokenizerFiles, caplog: pytest.LogCaptureFixture
) -> None:
    checked = await start(like(files), spec=replace(SPEC, hash_algo="sha256"))
    await until(lambda: checked.mismatch, "it is seen")
    assert "hash blocks by 'sha256'; start them with --prefix-caching-hash-algo sha256_cbor" in caplog.text


async def test_worker_that_does_not_say_how_it_tokenizes_is_asked_again(
    start: Start, files: TokenizerFiles, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    checked = await start(None)
    await until(lambda: "did not say how it tokenizes" in caplog.text, "it was asked")
    assert checked.mismatch == 0.0
    checked.workers[0].tokenize = like(files)
    await until(lambda: "tokenizes as this router does" in caplog.text, "it was asked again")


async def test_worker_that_never_says_it_keeps_nobody_from_being_asked_and_is_named_once(
    start: Start, files: TokenizerFiles, caplog: pytest.LogCaptureFixture
) -> None:
    checked = await start(None, None, None)
    await until(lambda: all(caplog.text.count(w.host_port) for w in checked.workers), "all were asked")
    checked.workers[2].tokenize = drop_one(files)
    await until(lambda: checked.mismatch, "the mismatch of the last one is seen")
    assert caplog.text.count("did not say how it tokenizes") == 3


async def test_prompts_whose_blocks_are_never_announced_are_a_mismatch(
    start: Start, files: TokenizerFiles, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcements, "ANNOUNCE_S", 0.1)
    checked = await start(like(files))
    for n in range(announcements.MISSES):
        ids = [100 * n + token for token in range(200)]
        assert (await checked.cluster.post("/v1/completions", {"model": "m", "prompt": ids}))[0] == 200
        # Its engine seems to hash with a seed of its own.
        await announce(checked.cluster.index, checked.workers[0], keys([token + 1 for token in ids]))
        await until(lambda n=n: checked.missed > n or checked.mismatch, "it was missed")  # type: ignore[misc]
    await until(lambda: checked.mismatch, "the mismatch is seen")
    assert "announces blocks, but none of the last" in caplog.text


async def test_proof_by_events_gets_another_chance(
    start: Start, files: TokenizerFiles, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_check, "RECHECK_S", 0.3)
    checked = await start(like(files))
    holder = Holder(WorkerId(checked.workers[0].host_port))
    checked.announced._misses[holder] = announcements.MISSES
    await until(lambda: checked.mismatch, "the mismatch is seen")
    await until(lambda: checked.mismatch == 0.0, "it is forgotten")
    assert "are checked again" in caplog.text
    assert checked.missed == 0


async def test_client_that_names_a_rank_proves_nothing_about_the_one_that_was_chosen(
    start: Start, files: TokenizerFiles
) -> None:
    checked = await start(None)
    await checked.join(0, dp_size=2)
    ids = list(range(200))
    for headers, watched in (({"X-data-parallel-rank": "0"}, 0), ({}, 1)):
        request = {"model": "m", "prompt": ids}
        assert (await checked.cluster.post("/v1/completions", request, headers=headers))[0] == 200
        assert checked.watched == watched


async def test_prompts_whose_blocks_are_announced_prove_that_all_is_well(
    start: Start, files: TokenizerFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcements, "ANNOUNCE_S", 0.1)
    checked = await start(like(files))
    held: list[bytes] = []
    for n in range(2 * announcements.MISSES):
        ids = [100 * n + token for token in range(200)]
        assert (await checked.cluster.post("/v1/completions", {"model": "m", "prompt": ids}))[0] == 200
        held += keys(ids)
        await announce(checked.cluster.index, checked.workers[0], held)
        await until(lambda: not checked.watched, "it was looked at")
    assert checked.mismatch == 0.0

"""What the router says about its decisions: in a header, at an endpoint, and from a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.router.conftest import BLOCK, PD, Cluster, StartCluster, StartWorker
from tests.unit.router.fake_worker import cut, status
from tests.unit.router.test_kv_routing import PATH, PROMPT, TURNS, Pair, body, pd_cluster, start_pair
from vllm_pd.cli import main
from vllm_pd.router.explanation import SHOWN
from vllm_pd.routing.record import read_record, repeat
from vllm_pd.state import Role

EXPLAIN = {"x-vllm-pd-explain": "1"}


async def decision(cluster: Cluster, request: Any, **options: Any) -> tuple[int, Any]:
    async with cluster.client.post(
        cluster.url + PATH, data=json.dumps(request), headers={**EXPLAIN, **options.pop("headers", {})}
    ) as answer:
        await answer.read()
        text = answer.headers.get("x-vllm-pd-decision")
        return answer.status, json.loads(text) if text else None


@pytest.fixture
async def pair(start_cluster: StartCluster, start_worker: StartWorker) -> Pair:
    pair = await start_pair(start_cluster, start_worker)
    await pair.holds(0, PROMPT)
    return pair


@pytest.mark.parametrize("stream", [False, True])
async def test_answer_tells_who_was_chosen_and_why_if_asked(pair: Pair, stream: bool) -> None:
    code, told = await decision(pair.cluster, body(PROMPT, n=2, stream=stream))
    assert code == 200
    chosen, other = (worker.host_port for worker in pair.workers)
    assert (told["decode"], told["prefill"], told["reason"], told["choice"]) == (chosen, None, "n", "lowest")
    assert (told["policy"], told["tokens"], told["blocks"], told["unknown"]) == ("predicted", len(PROMPT), TURNS, None)
    (first, second) = told["candidates"]
    assert first[:4] == [chosen, TURNS, 0, 0]
    assert second[:4] == [other, 0, 0, 0]
    assert first[4] < second[4]
    assert told["count"] == 2


async def test_nothing_is_told_unasked(pair: Pair) -> None:
    async with pair.cluster.client.post(pair.cluster.url + PATH, data=json.dumps(body(PROMPT))) as answer:
        assert "x-vllm-pd-decision" not in answer.headers


async def test_errors_tell_it_too(pair: Pair) -> None:
    pair.workers[0].hook = status(400)
    code, told = await decision(pair.cluster, body(PROMPT, n=2))
    assert (code, told["decode"]) == (400, pair.workers[0].host_port)
    for worker in pair.workers:
        worker.hook = cut
    code, told = await decision(pair.cluster, body(PROMPT, n=2))
    assert code == 502
    assert told["count"] == 2


async def test_split_request_names_both_legs(pd: PD) -> None:
    code, told = await decision(pd.cluster, body(PROMPT))
    assert code == 200
    assert (told["prefill"], told["decode"], told["reason"]) == (pd.prefill.host_port, pd.decode.host_port, "split")
    assert [each[0] for each in told["prefill_candidates"]] == [pd.prefill.host_port]


async def test_header_stays_short_with_many_workers(start_cluster: StartCluster, start_worker: StartWorker) -> None:
    cluster = await start_cluster()
    worker = await start_worker()
    await cluster.join(worker, Role.BOTH, dp_size=200)
    code, told = await decision(cluster, body(PROMPT))
    assert code == 200
    assert told["count"] == 200
    assert len(told["candidates"]) == SHOWN
    assert len(json.dumps(told)) < 2000


async def explained(cluster: Cluster, request: Any, query: str = "", **options: Any) -> tuple[int, bytes]:
    return await cluster.post("/v1/explain" + query, request, **options)


async def test_endpoint_answers_with_a_record_and_sends_nothing_on(pair: Pair) -> None:
    code, answer = await explained(pair.cluster, body(PROMPT, n=2))
    assert code == 200
    assert not pair.workers[0].posts and not pair.workers[1].posts
    assert pair.cluster.inflight() == 0
    record = read_record(answer)
    assert record.outcome.decode.worker == pair.workers[0].host_port
    assert (record.path, record.model, record.reason, record.forbidden) == (PATH, "m", "n", "n")
    assert repeat(record) == record.outcome
    (pool,) = record.pools
    assert (pool.ask.tokens, pool.ask.block_size, pool.blocks, pool.why_unknown) == (len(PROMPT), BLOCK, TURNS, "")
    assert [candidate.overlap.gpu for candidate in pool.candidates if candidate.worker == record.outcome.decode.worker]
    assert pool.index_age is not None


async def test_endpoint_explains_what_then_happens(pair: Pair) -> None:
    for ids in (PROMPT, PROMPT[: 3 * BLOCK], [1] * 100, [2] * 50):
        record = read_record((await explained(pair.cluster, body(ids, n=2)))[1])
        expected = [worker.host_port for worker in pair.workers].index(record.outcome.decode.worker)
        assert await pair.goes_to(ids) == expected


async def test_endpoint_tells_chats_from_completions_or_is_told(pair: Pair) -> None:
    chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    assert read_record((await explained(pair.cluster, chat))[1]).path == "/v1/chat/completions"
    told = await explained(pair.cluster, body(PROMPT), "?path=/v1/embeddings")
    record = read_record(told[1])
    assert (record.path, record.forbidden, record.pools[0].why_unknown) == ("/v1/embeddings", "endpoint", "endpoint")
    code, answer = await explained(pair.cluster, body(PROMPT), "?path=/admin")
    assert code == 400
    assert "path must be one of /v1/chat/completions" in json.loads(answer)["error"]["message"]


async def test_endpoint_takes_the_routers_key_and_posts_only(
    start_cluster: StartCluster, start_worker: StartWorker
) -> None:
    pair = await start_pair(start_cluster, start_worker, api_key="secret")
    assert (await explained(pair.cluster, body(PROMPT)))[0] == 401
    assert (await explained(pair.cluster, body(PROMPT), headers={"Authorization": "Bearer secret"}))[0] == 200
    assert (await pair.cluster.get("/v1/explain"))[0] == 405


async def test_cluster_without_workers_has_nothing_to_explain(start_cluster: StartCluster) -> None:
    cluster = await start_cluster()
    assert (await explained(cluster, body(PROMPT)))[0] == 503


# The command.


@pytest.fixture
async def file(start_cluster: StartCluster, start_worker: StartWorker, tmp_path: Path) -> Path:
    decode, prefillers = await pd_cluster(start_cluster, start_worker)
    await Pair(decode.cluster, prefillers).holds(1, PROMPT)
    path = tmp_path / "decision.json"
    path.write_bytes((await explained(decode.cluster, body(PROMPT)))[1])
    return path


def test_command_shows_a_record_and_that_it_comes_out_the_same(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(file)]) == 0
    shown = capsys.readouterr().out
    record = read_record(file.read_bytes())
    assert record.outcome.prefill is not None
    assert record.outcome.decode.worker in shown
    assert record.outcome.prefill.worker in shown
    assert "made again from the record: the same" in shown
    assert f"{len(PROMPT)} tokens" in shown


def test_command_says_what_other_policies_would_have_done(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(file), "--policy", "least-loaded", "--policy", "predicted", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["reproduced"] is True
    assert list(told["policies"]) == ["least-loaded", "predicted"]
    record = read_record(file.read_bytes())
    assert told["policies"]["predicted"]["decode"] == list(record.outcome.decode)
    assert "parts" in told["policies"]["least-loaded"]["decoders"][0]


def test_command_says_what_other_rules_would_have_done_and_why(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(file), "--disagg", "all", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    why = {name: rule["whole_or_split"] for name, rule in told["rules"].items()}
    assert why == {
        # A prefill worker holds the prompt.
        "auto": "split",
        "always": "split",
        "never": "never",
        "threshold": "split",
        "dynamo-old": "short",
        "dynamo-new": "split",
    }
    assert told["rules"]["auto"]["weighed"]["transfer"] > 0
    assert main(["explain", str(file), "--disagg", "dynamo-old"]) == 0
    shown = capsys.readouterr().out
    assert "rule always" in shown and "short" in shown


async def test_command_says_what_the_rule_weighed(
    start_cluster: StartCluster, start_worker: StartWorker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    decode, _ = await pd_cluster(start_cluster, start_worker, disagg="auto")
    path = tmp_path / "decision.json"
    path.write_bytes((await explained(decode.cluster, body(PROMPT)))[1])
    assert main(["explain", str(path)]) == 0
    assert "rule auto: everybody together waits" in capsys.readouterr().out


def test_command_says_when_a_record_does_not_come_out_the_same(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = json.loads(file.read_bytes())
    value["outcome"]["decode"] = ["somebody-else", 0]
    file.write_text(json.dumps(value))
    assert main(["explain", str(file)]) == 1
    assert "another version" in capsys.readouterr().out


@pytest.mark.parametrize(("text", "words"), [("{}", "format 0"), (None, "cannot be read")])
def test_command_refuses_what_is_no_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, words: str
) -> None:
    path = tmp_path / "x.json"
    if text is not None:
        path.write_text(text)
    assert main(["explain", str(path)]) == 2
    assert words in capsys.readouterr().err


def test_command_names_the_policies_there_are(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(file), "--policy", "magic"]) == 2
    assert "choose one of predicted" in capsys.readouterr().err

"""A stream whose worker is lost: what the client gets when another goes on, and what when nobody does."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from tests.unit.router.conftest import LONG, Cluster, StartCluster, StartWorker, until
from tests.unit.router.fake_worker import FakeWorker, Hook, Seen, status
from tests.unit.router.teller import FIRST, PIECES, PROMPT, Break, Teller, text_of
from vllm_pd.state import Role

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
MESSAGES = [{"role": "user", "content": LONG}]


def body(path: str, **fields: Any) -> dict[str, Any]:
    prompt = {"messages": MESSAGES} if path == CHAT else {"prompt": LONG}
    return {"model": "m", **prompt, "max_tokens": 30, "temperature": 0, "stream": True, **fields}


def whole(path: str, asked: dict[str, Any], **teller: Any) -> bytes:
    """What the client would have got of the first worker, had it gone on."""
    return b"".join(Teller(**teller).events(asked, chat=path == CHAT))


def events(answer: bytes) -> list[Any]:
    parts = [part.removeprefix(b"data: ") for part in answer.split(b"\n\n") if part]
    return [part.decode() if part == b"[DONE]" else json.loads(part) for part in parts]


def text(answer: bytes) -> str:
    choices = [event["choices"][0] for event in events(answer) if isinstance(event, dict) and event.get("choices")]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


def error(answer: bytes) -> dict[str, Any]:
    """The error event that ends a stream."""
    found: dict[str, Any] = events(answer)[-1]["error"]
    return found


@dataclass
class Two:
    """Two decode workers; the first is asked first."""

    cluster: Cluster
    workers: list[FakeWorker]
    tellers: list[Teller] = field(default_factory=list)

    async def ask(self, path: str, asked: dict[str, Any]) -> bytes:
        code, answer = await self.cluster.post(path, asked)
        assert code == 200
        await until(lambda: not self.cluster.inflight(), "all is over")
        return answer

    def outcome(self, outcome: str, why: str = "") -> float:
        return self.cluster.metric("broken_streams_total", outcome=outcome, why=why)

    @property
    def continued(self) -> list[Seen]:
        """Completions that the second worker was asked for."""
        return [seen for seen in self.workers[1].posts if seen.path == COMPLETION]


@pytest.fixture
async def start_two(start_cluster: StartCluster, start_worker: StartWorker) -> Any:
    async def start(*tellers: Teller, **settings: Any) -> Two:
        cluster = await start_cluster(policy="least-loaded", **settings)
        two = Two(cluster, [await start_worker() for _ in tellers], list(tellers))
        for number, (worker, teller) in enumerate(zip(two.workers, tellers, strict=True)):
            teller.id = teller.id if number == 0 else f"other-{number}"
            worker.hook = teller.hook
            await cluster.join(worker, Role.DECODE)
            await cluster.load(worker, running=9 * number)
        return two

    return start


async def nonsense(request: web.Request, _: Seen) -> web.StreamResponse:
    """A page instead of events."""
    response = web.StreamResponse(headers={"Content-Type": "text/html"})
    await response.prepare(request)
    await response.write(b"<html>hello</html>")
    return response


USAGE = (None, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True})


@pytest.mark.parametrize("usage", USAGE)
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_ids_that_only_the_router_asked_for_are_not_seen(start_two: Any, path: str, usage: Any) -> None:
    two = await start_two(Teller())
    asked = body(path, **({"stream_options": usage} if usage else {}))
    assert await two.ask(path, asked) == whole(path, asked)
    assert two.workers[0].posts[0].json["return_token_ids"] is True
    asked["return_token_ids"] = True
    assert await two.ask(path, asked) == whole(path, asked)


@pytest.mark.parametrize("how", ["cut", "eof", "abort", "error"])
@pytest.mark.parametrize("usage", USAGE)
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_another_worker_goes_on_and_the_client_sees_no_difference(
    start_two: Any, path: str, usage: Any, how: str
) -> None:
    two = await start_two(Teller([Break(5, how, torn=b'data: {"id":"firs')]), Teller())
    asked = body(path, **({"stream_options": usage} if usage else {}))
    assert await two.ask(path, asked) == whole(path, asked)
    assert two.outcome("continued") == 1
    assert two.cluster.metric("continuation_seconds_count") == 1
    (seen,) = two.continued
    assert seen.json["prompt"] == [*PROMPT, *range(FIRST, FIRST + 5)]
    assert seen.json["max_tokens"] == 25


async def test_a_stalled_stream_goes_on_elsewhere(start_two: Any) -> None:
    two = await start_two(Teller([Break(5, "stall")]), Teller(), idle_timeout=1.0)
    assert await two.ask(CHAT, body(CHAT)) == whole(CHAT, body(CHAT))


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_a_client_that_asked_for_ids_gets_them_all(start_two: Any, path: str) -> None:
    two = await start_two(Teller([Break(6, "cut")]), Teller())
    asked = body(path, return_token_ids=True)
    assert await two.ask(path, asked) == whole(path, asked)


async def test_what_is_asked_for_goes_along_and_what_is_spent_does_not(start_two: Any) -> None:
    two = await start_two(Teller([Break(10, "cut")]), Teller())
    kept = {
        "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "ignore_eos": True,
        "logit_bias": {"7": -3.5}, "allowed_token_ids": [1, 2], "stop_token_ids": [9], "cache_salt": "s", "user": "u",
        "skip_special_tokens": False, "priority": 3,
    }  # fmt: skip
    asked = body(CHAT, **kept, min_tokens=14, max_completion_tokens=20, reasoning_effort="low", seed=None, n=1, stop=[])
    assert text(await two.ask(CHAT, asked)) == text_of(20)
    (seen,) = two.continued
    assert seen.json == {
        **kept, "model": "m", "stream": True, "return_token_ids": True, "min_tokens": 4, "max_tokens": 10,
        "prompt": [*PROMPT, *range(FIRST, FIRST + 10)],
    }  # fmt: skip
    assert seen.header("x-request-id") == f"{two.workers[0].posts[0].header('x-request-id')}-continued-1"


async def test_a_chat_without_a_limit_gets_what_fits(start_two: Any) -> None:
    two = await start_two(Teller([Break(5, "cut")]), Teller())
    asked = body(CHAT)
    del asked["max_tokens"]
    await two.ask(CHAT, asked)
    # 2048 is what the fake workers say of their model.
    assert two.continued[0].json["max_tokens"] == 2048 - len(PROMPT) - 5


@pytest.mark.parametrize("after", range(1, len(PIECES) + 1))
async def test_it_goes_on_where_the_text_ends_and_not_within_a_character(start_two: Any, after: int) -> None:
    """A worker that goes on within a character repeats the whole prompt as text."""
    two = await start_two(Teller([Break(after, "cut")]), Teller())
    assert text(await two.ask(CHAT, body(CHAT))) == text_of(30)
    kept = len(two.continued[0].json["prompt"]) - len(PROMPT)
    assert kept == after - (PIECES[after - 1] == "")


@pytest.mark.parametrize("after", range(2, len(PIECES)))
async def test_a_worker_tells_whether_several_tokens_in_one_event_end_within_a_character(
    start_two: Any, after: int
) -> None:
    two = await start_two(Teller([Break(after, "cut")], merge=after), Teller())
    assert text(await two.ask(COMPLETION, body(COMPLETION))) == text_of(30)
    assert two.tellers[1].detokenized
    assert len(two.continued[0].json["prompt"]) - len(PROMPT) == after - (PIECES[after - 1] == "")


async def test_where_no_worker_can_tell_that_the_stream_ends_with_an_error(start_two: Any) -> None:
    two = await start_two(Teller([Break(4, "cut")], merge=4), Teller())

    async def refuse(request: Any, seen: Seen) -> Any:
        return await (status(404) if request.path == "/detokenize" else two.tellers[1].hook)(request, seen)

    two.workers[1].hook = refuse
    assert "a character had come in part" in error(await two.ask(CHAT, body(CHAT)))["message"]
    assert two.outcome("ended", "held_back") == 1


@pytest.mark.parametrize("fields", [{"return_token_ids": True}, {"stream_options": USAGE[2]}])
async def test_tokens_that_the_client_knows_of_are_not_drawn_again(start_two: Any, fields: dict[str, Any]) -> None:
    two = await start_two(Teller([Break(4, "cut")]), Teller())
    answer = await two.ask(CHAT, body(CHAT, **fields))
    assert "a character had come in part" in error(answer)["message"]
    assert not two.continued


async def test_a_stream_is_continued_as_often_as_the_settings_say(start_two: Any) -> None:
    breaks = [[Break(3, "cut")], [Break(3, "cut")], [Break(3, "eof")], []]
    two = await start_two(*(Teller(each) for each in breaks), continue_streams=3)
    assert await two.ask(CHAT, body(CHAT)) == whole(CHAT, body(CHAT))
    assert two.outcome("continued") == 3

    two = await start_two(*(Teller([Break(3, "cut")]) for _ in range(4)))
    answer = await two.ask(CHAT, body(CHAT))
    assert text(answer) == text_of(9)
    assert "as often as --continue-streams allows" in error(answer)["message"]
    assert (two.outcome("continued"), two.outcome("ended", "times")) == (2, 1)


async def test_with_the_setting_off_nothing_is_asked_for_and_a_broken_stream_ends_with_an_error(start_two: Any) -> None:
    two = await start_two(Teller([Break(3, "cut")]), Teller(), continue_streams=0)
    answer = await two.ask(CHAT, body(CHAT))
    assert text(answer) == text_of(3)
    problem = error(answer)
    assert problem["code"] == 502
    assert two.workers[0].host_port in problem["message"]
    assert "--continue-streams is 0" in problem["message"]
    assert two.workers[0].posts[0].json == body(CHAT)
    assert not two.continued


async def test_a_request_that_could_not_be_continued_exactly_passes_as_it_is(start_two: Any) -> None:
    two = await start_two(Teller([Break(3, "cut", torn=b"data: {")]), Teller())
    asked = json.dumps(body(COMPLETION, seed=4)).encode()
    code, answer = await two.cluster.post(COMPLETION, asked)
    assert code == 200
    assert two.workers[0].posts[0].raw == asked
    assert "(seed)" in error(answer.replace(b"data: {\n", b"\n"))["message"]
    assert two.outcome("ended", "seed") == 1
    assert not two.continued


async def test_the_only_worker_is_asked_again_since_a_connection_is_not_a_worker(start_two: Any) -> None:
    two = await start_two(Teller([Break(5, "cut")]))
    assert text(await two.ask(CHAT, body(CHAT))) == text_of(30)
    assert two.outcome("continued") == 1


async def test_a_worker_that_is_dead_and_the_only_one_ends_the_stream_with_an_error(start_two: Any) -> None:
    two = await start_two(Teller([Break(5, "cut")]))
    teller = two.tellers[0]

    async def tell_and_die(request: Any, seen: Seen) -> Any:
        asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(two.workers[0].stop()))
        return await teller.hook(request, seen)

    two.workers[0].hook = tell_and_die
    answer = await two.ask(CHAT, body(CHAT))
    assert text(answer) == text_of(5)
    message = error(answer)["message"]
    assert f"Worker {two.workers[0].host_port} broke off its answer" in message
    assert "could not be continued elsewhere" in message
    assert two.outcome("failed") == 1


@pytest.mark.parametrize("hook", [status(400), nonsense])
async def test_an_answer_to_a_continuation_that_is_no_stream_of_events_is_not_put_into_the_stream(
    start_two: Any, hook: Hook
) -> None:
    two = await start_two(Teller([Break(5, "cut")]), Teller())
    two.workers[1].hook = hook
    answer = await two.ask(CHAT, body(CHAT))
    assert text(answer) == text_of(5)
    assert "could not be continued elsewhere" in error(answer)["message"]


async def test_a_worker_that_refuses_to_go_on_is_replaced_by_the_next(start_two: Any) -> None:
    two = await start_two(Teller([Break(5, "cut")]), Teller(), Teller())
    two.workers[1].hook = status(503)
    assert await two.ask(CHAT, body(CHAT)) == whole(CHAT, body(CHAT))


@pytest.mark.parametrize("usage", USAGE[:2])
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_a_stream_of_which_only_the_end_is_missing_is_completed_by_the_router(
    start_two: Any, path: str, usage: Any
) -> None:
    two = await start_two(Teller([Break(30, "eof")]), Teller())
    asked = body(path, **({"stream_options": usage} if usage else {}))
    assert await two.ask(path, asked) == whole(path, asked)
    assert two.outcome("completed") == 1
    assert not two.continued


@pytest.mark.parametrize("breaks", [[], [Break(7, "cut")]])
async def test_what_a_parser_made_is_passed_on_as_without_ids_and_not_continued(
    start_two: Any, breaks: list[Break]
) -> None:
    two = await start_two(Teller(list(breaks), parses=True), Teller())
    answer = await two.ask(CHAT, body(CHAT))
    wanted = whole(CHAT, body(CHAT), parses=True)
    if not breaks:
        assert answer == wanted
        return
    assert wanted.startswith(answer[: answer.index(b"\n\n\n\n")])
    assert "a parser of the worker" in error(answer)["message"]
    assert two.outcome("ended", "parser") == 1


async def test_a_worker_that_gives_no_ids_streams_all_the_same(start_two: Any) -> None:
    two = await start_two(Teller([], gives_ids=False), Teller())
    assert await two.ask(CHAT, body(CHAT)) == whole(CHAT, body(CHAT))
    two.tellers[0].breaks.append(Break(5, "cut"))
    assert "no token ids" in error(await two.ask(CHAT, body(CHAT)))["message"]


async def test_the_prompt_is_prefilled_elsewhere_where_that_is_sooner(
    start_two: Any, start_worker: StartWorker
) -> None:
    two = await start_two(Teller([Break(5, "cut")]), Teller())
    prefill = await start_worker()
    await two.cluster.join(prefill, Role.PREFILL)
    # Longer than a block: the continuation's prompt is 45 tokens.
    assert await two.ask(CHAT, body(CHAT)) == whole(CHAT, body(CHAT))
    leg = prefill.posts[-1]
    assert leg.path == COMPLETION
    assert leg.json["prompt"] == two.continued[0].json["prompt"]
    assert leg.json["max_tokens"] == 1
    assert two.continued[0].json["kv_transfer_params"]["do_remote_prefill"] is True


async def test_a_stream_that_has_begun_goes_on_without_prefill_workers_even_in_strict_mode(
    start_two: Any, start_worker: StartWorker
) -> None:
    two = await start_two(Teller([Break(5, "cut")]), Teller(), require_prefill=True)
    prefill = await start_worker()
    await two.cluster.join(prefill, Role.PREFILL)
    asked: list[Seen] = []

    async def prefill_once(request: web.Request, seen: Seen) -> web.StreamResponse:
        asked.append(seen)
        return await (prefill.answer if len(asked) == 1 else status(500))(request, seen)

    prefill.hook = prefill_once
    assert await two.ask(COMPLETION, body(COMPLETION)) == whole(COMPLETION, body(COMPLETION))
    assert len(asked) == 2
    assert two.outcome("continued") == 1


@pytest.mark.parametrize("how", ["cut", "eof", "error"])
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_a_stream_that_breaks_before_its_first_token_is_the_whole_request_again(
    start_two: Any, path: str, how: str
) -> None:
    two = await start_two(Teller([Break(0, how, torn=b'data: {"id":"firs')] * 2), Teller())
    assert await two.ask(path, body(path)) == whole(path, body(path), id="other-1")
    assert two.workers[1].posts[0].path == path
    assert any(two.cluster.metric("decode_retry_total", reason=reason) for reason in ("disconnect", "status_5xx"))
    assert not two.outcome("continued")


@pytest.mark.parametrize(
    ("says", "left"),
    [
        ({"default_answer_limit": 20}, 15),
        ({"answer_cap": 25}, 20),
        ({"default_answer_limit": 40, "answer_cap": 25}, 20),
        ({"max_model_len": len(PROMPT) + 12}, 7),
    ],
)
async def test_what_the_server_gives_at_most_is_kept_to(start_two: Any, says: dict[str, int], left: int) -> None:
    two = await start_two(Teller([Break(5, "cut")]), Teller())
    await two.cluster.join(two.workers[0], Role.DECODE, **says)
    asked = body(CHAT)
    del asked["max_tokens"]
    await two.ask(CHAT, asked)
    assert two.continued[0].json["max_tokens"] == left


@pytest.mark.parametrize(
    ("says", "why"), [({"penalises_answers": True}, "default_penalty"), ({"max_model_len": 0}, "no_limit")]
)
async def test_a_server_whose_ways_forbid_it_is_named(start_two: Any, says: dict[str, Any], why: str) -> None:
    two = await start_two(Teller([Break(5, "cut")]), Teller())
    await two.cluster.join(two.workers[0], Role.DECODE, **says)
    asked = body(CHAT)
    del asked["max_tokens"]
    assert two.workers[0].host_port in error(await two.ask(CHAT, asked))["message"]
    assert two.outcome("ended", why) == 1


async def test_beyond_the_budget_of_retries_a_stream_that_breaks_again_ends_with_an_error(start_two: Any) -> None:
    two = await start_two(Teller([Break(5, "cut")]), Teller([Break(6, "cut")]), retry_ratio=0.0, retry_floor=0.0)
    answer = await two.ask(CHAT, body(CHAT))
    assert text(answer) == text_of(11)
    assert "had to be retried" in error(answer)["message"]
    assert (two.outcome("continued"), two.outcome("ended", "budget")) == (1, 1)


async def test_a_client_that_leaves_ends_the_continuation_at_once(start_two: Any) -> None:
    two = await start_two(Teller([Break(5, "cut")]), Teller(gate=asyncio.Event()))
    async with two.cluster.client.post(two.cluster.url + CHAT, json=body(CHAT)) as answer:
        await until(lambda: two.continued, "the second worker was asked")
        answer.close()
    await until(two.continued[0].cancelled.is_set, "the second worker saw that the client left")
    await until(lambda: not two.cluster.inflight(), "all is over")

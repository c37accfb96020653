"""What the router counts for planners, and that it tells them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from tests.unit.router.conftest import LONG, PD, SPEC
from tests.unit.router.fake_worker import Seen
from vllm_pd.errors import StoreError
from vllm_pd.router.demand_report import DemandMeter, DemandPublisher, PoolTotals, Served
from vllm_pd.routing.rates import RateLearner, prefill_work
from vllm_pd.state.demand import DemandReport
from vllm_pd.state.memory_demand import MemoryDemandBoard
from vllm_pd.state.memory_store import MemoryStore

CHAT = {"model": "m", "messages": [{"role": "user", "content": LONG}], "max_tokens": 9}
COMPLETION = {"model": "m", "prompt": LONG, "max_tokens": 9}


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def served(preface: int = 0) -> tuple[Served, PoolTotals, Clock]:
    totals, clock = PoolTotals(), Clock()
    return Served(totals, preface, clock), totals, clock


def gaps(totals: PoolTotals) -> tuple[int, float]:
    return sum(totals.itl.counts), totals.itl.sum_s


def test_gaps_are_between_tokens_and_those_that_come_together_share_the_time() -> None:
    answer, totals, clock = served()
    clock.now += 1
    answer.begun(1.0)
    answer.events(b"data: {}\n\n")
    clock.now += 0.2
    answer.events(b"data: {}\n\ndata: {}\n\n")
    clock.now += 0.1
    answer.events(b"data: {")
    clock.now += 0.1
    answer.events(b"}\n\n")
    answer.events(b"data: [DONE]\n\n")
    answer.ended()
    count, seconds = gaps(totals)
    assert count == 3
    assert seconds == pytest.approx(0.4)
    assert (totals.output_tokens, totals.finished, totals.finished_output_tokens) == (4, 1, 4)
    assert (sum(totals.ttft.counts), totals.ttft.sum_s) == (1, 1.0)


def test_an_answer_counts_once_with_the_mean_of_its_gaps_and_not_without_any() -> None:
    answer, totals, clock = served()
    answer.begun(1.0)
    answer.events(b"data: {}\n\n")
    for seconds in (0.02, 0.02, 0.11):
        clock.now += seconds
        answer.events(b"data: {}\n\n")
    assert sum(totals.answer_itl.counts) == 0
    answer.ended()
    assert (sum(totals.answer_itl.counts), totals.answer_itl.sum_s) == (1, pytest.approx(0.05))
    one, whole = Served(totals, 0, clock), Served(totals, 0, clock)
    one.events(b"data: {}\n\n")
    one.ended()
    whole.whole(b'{"usage": {"completion_tokens": 8}}')
    whole.ended()
    assert sum(totals.answer_itl.counts) == 1 and totals.finished == 3


def test_the_role_of_a_chat_and_the_end_of_a_stream_are_no_tokens() -> None:
    answer, totals, _ = served(preface=1)
    answer.begun(0.5)
    answer.events(b'data: {"role"}\n\n')
    answer.events(b"data: {}\n\ndata: {}\n\ndata: [DONE]\n\n")
    assert totals.output_tokens == 2
    assert gaps(totals)[0] == 0


def test_the_counts_at_the_end_of_a_stream_are_no_token() -> None:
    answer, totals, _ = served()
    answer.begun(0.5)
    answer.events(b'data: {"choices":[{"text":"a"}],"usage":null}\n\n')
    answer.events(b'data: {"choices":[],"usage":{"completion_tokens":1}}\n\ndata: [DONE]\n\n')
    assert (totals.output_tokens, gaps(totals)[0]) == (1, 0)


def test_an_event_with_several_tokens_counts_as_many_where_that_is_known() -> None:
    answer, totals, clock = served(preface=1)
    answer.begun(0.5)
    answer.events(b"data: {}\n\n", 0)
    answer.events(b"data: {}\n\n", 1)
    clock.now += 0.6
    answer.events(b"data: {}\n\n", 3)
    assert totals.output_tokens == 4
    assert gaps(totals) == (3, pytest.approx(0.6))


def test_the_time_in_which_another_worker_takes_a_stream_over_is_a_gap_in_it() -> None:
    answer, totals, clock = served()
    answer.begun(0.5)
    answer.events(b"data: {}\n\n")
    clock.now += 2
    answer.begun(None)
    answer.events(b"data: {}\n\n")
    assert gaps(totals) == (1, pytest.approx(2.0))


def test_what_has_no_answer_makes_answers_no_shorter() -> None:
    refused, totals, _ = served()
    refused.ended()
    assert totals.finished == 0


def test_a_wall_clock_that_jumps_does_not_change_the_time_in_which_it_was_served(
    monkeypatch: pytest.MonkeyPatch, pd: PD
) -> None:
    clock, directory = Clock(), pd.cluster.service.directory
    meter = DemandMeter(clock)
    first = meter.report(SPEC.id, directory)
    monkeypatch.setattr("vllm_pd.router.demand_report.time.time", lambda: 5.0)
    clock.now += 10
    meter.arrived(SPEC.id, 10, 10, chat=False)
    later = meter.report(SPEC.id, directory)
    assert (later.started_ms, later.at_ms - first.at_ms) == (first.started_ms, 10_000)


async def test_totals_that_begin_anew_say_so(pd: PD) -> None:
    meter, directory = DemandMeter(), pd.cluster.service.directory
    meter.arrived(SPEC.id, 10, 10, chat=False)
    before = meter.report(SPEC.id, directory)
    await asyncio.sleep(0.002)
    meter.keep_only(set())
    after = meter.report(SPEC.id, directory)
    assert (after.arrivals, after.started_ms > before.started_ms) == (0, True)


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        (b'{"choices":[{"text":"\\"completion_tokens\\": 7"}],"usage":{"completion_tokens": 12,"x":1}}', 12),
        (b'{"usage":{"completion_tokens":12}}', 12),
        (b'{"usage":{"completion_tokens":null}}', 0),
        (b'{"choices":[]}', 0),
        (b'"completion_tokens":', 0),
    ],
)
def test_a_whole_answer_says_itself_how_long_it_is(body: bytes, tokens: int) -> None:
    answer, totals, _ = served()
    answer.begun(None)
    answer.whole(body)
    answer.ended()
    assert (totals.output_tokens, totals.finished_output_tokens) == (tokens, tokens)
    assert sum(totals.ttft.counts) == 0


async def report(pd: PD) -> DemandReport:
    board = MemoryDemandBoard("default", pd.cluster.store)
    await DemandPublisher(board, pd.cluster.service.directory, pd.cluster.service.meter, "r1").refresh()
    return (await board.read(SPEC.id))["r1"]


async def test_requests_are_counted_once_whichever_way_they_go(pd: PD) -> None:
    before = await report(pd)
    assert (before.arrivals, before.finished, before.rates) == (0, 0, None)
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
        for stream in (True, False):
            status, _ = await pd.cluster.post(path, {**body, "stream": stream})
            assert status == 200
    after = await report(pd)
    # The fake worker's whole answers do not say how long they are.
    assert (after.arrivals, after.finished) == (4, 2)
    assert after.prompt_tokens >= after.uncached_tokens > 0
    # Two events of each stream, of a chat's the first is the role.
    assert after.output_tokens == after.finished_output_tokens == 3
    assert sum(after.ttft.counts) == 2
    assert after.at_ms >= before.at_ms
    assert after.started_ms == before.started_ms


async def test_what_generates_nothing_is_not_counted(pd: PD) -> None:
    await pd.cluster.post("/tokenize", {"model": "m", "prompt": "a"})
    await pd.cluster.post("/v1/embeddings", {"model": "m", "input": "a"})
    assert (await report(pd)).arrivals == 0
    await pd.cluster.post("/v1/messages", {"model": "m", "messages": []})
    assert (await report(pd)).arrivals == 1


async def test_a_request_that_nobody_serves_and_a_client_that_leaves_have_arrived_too(pd: PD) -> None:
    async def refuse(_: web.Request, __: Seen) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no"}}, status=400)

    pd.prefill.hook = pd.decode.hook = refuse
    await pd.cluster.post("/v1/completions", COMPLETION)
    pd.prefill.hook = pd.decode.hook = None
    pd.decode.gate = asyncio.Event()
    url = f"{pd.cluster.url}/v1/completions"
    async with pd.cluster.client.post(url, data=json.dumps({**COMPLETION, "stream": True})) as answer:
        await answer.content.readany()
    pd.decode.gate.set()
    totals: list[Any] = []

    async def both() -> bool:
        totals[:] = [await report(pd)]
        return totals[0].finished == 1

    for _ in range(500):
        if await both():
            break
        await asyncio.sleep(0.02)
    # What nobody answered has no length.
    assert (totals[0].arrivals, totals[0].finished) == (2, 1)
    assert sum(totals[0].ttft.counts) == 1


async def test_rates_are_told_once_prefilling_and_decoding_were_seen() -> None:
    learner = RateLearner()
    learner.observe_prefill(prefill_work(1000, 0), 0.05)
    assert not learner.is_learned
    learner.observe_step(2, 0.01)
    assert learner.is_learned


async def test_a_store_that_is_away_costs_nothing_but_a_report(pd: PD) -> None:
    class Away(MemoryDemandBoard):
        async def publish(self, *args: object, **named: object) -> None:
            raise StoreError("The store does not answer; start it.")

    service = pd.cluster.service
    await DemandPublisher(Away("default", MemoryStore()), service.directory, service.meter, "r1").refresh()
    status, _ = await pd.cluster.post("/v1/completions", COMPLETION)
    assert status == 200


def test_pools_that_are_gone_are_forgotten() -> None:
    meter = DemandMeter()
    meter.arrived(SPEC.id, 10, 10, chat=False).ended()
    meter.keep_only(set())
    assert not meter._pools

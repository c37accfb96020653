"""The event source against a publisher that loses, repeats, reorders and starts over."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.unit.agent.publisher import Publisher
from vllm_pd.agent.kv_event_source import EventEndpoints, KvEventSource, SourceLimits
from vllm_pd.agent.kv_events import decode
from vllm_pd.background import end_tasks

DEADLINE_S = 20.0
QUICK = SourceLimits(replay_s=1.0, replay_attempts=2, quiet_s=(0.05, 0.2))
NEVER_QUIET = dataclasses.replace(QUICK, quiet_s=(1000.0, 1000.0))


class Sink:
    """Remembers the name in each message, "lost" included."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def message(self, payload: bytes) -> None:
        (event,) = decode(payload).events
        self.seen.append(int.from_bytes(event.block_hashes[0], "big"))  # type: ignore[union-attr, arg-type]

    def lost(self) -> None:
        self.seen.append("lost")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Publisher]]:
    publishers: list[Publisher] = []

    def start(**options: Any) -> Publisher:
        publishers.append(Publisher(tmp_path, **options))
        return publishers[-1]

    yield start
    for publisher in publishers:
        publisher.stop()


@asynccontextmanager
async def following(
    endpoints: EventEndpoints, limits: SourceLimits = QUICK
) -> AsyncIterator[tuple[Sink, KvEventSource]]:
    sink = Sink()
    source = KvEventSource(endpoints, sink, limits)
    task = asyncio.create_task(source.run())
    try:
        yield sink, source
    finally:
        await end_tasks((task,))


async def subscribed(publisher: Publisher, sink: Sink, source: KvEventSource) -> int:
    """Publish until messages arrive without being asked for; returns how many were published."""
    published = 0
    async with asyncio.timeout(DEADLINE_S):
        while True:
            replays = source.stats.replays
            publisher.publish(name(published))
            published += 1
            await until(lambda: len(sink.seen) == published, sink)  # noqa: B023
            if 0 < replays == source.stats.replays:
                return published


async def until(condition: Callable[[], bool], sink: Sink) -> None:
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():  # noqa: ASYNC110 (the condition is somebody else's state)
                await asyncio.sleep(0.01)
    except TimeoutError:
        pytest.fail(f"it did not happen in time; seen: {sink.seen}")


def name(number: int) -> list[Any]:
    return [{"type": "BlockRemoved", "block_hashes": [number.to_bytes(32, "big")], "medium": "GPU", "group_idx": 0}]


async def test_messages_from_before_and_after_the_subscription_arrive_once_in_order(start: Any) -> None:
    publisher = start()
    for n in range(50):
        publisher.publish(name(n))
    async with following(publisher.endpoints) as (sink, _):
        for n in range(50, 300):
            publisher.publish(name(n))
        await until(lambda: len(sink.seen) >= 300, sink)
        assert sink.seen == list(range(300))


@pytest.mark.parametrize("how", ["drop", "twice", "late"])
async def test_a_lost_a_repeated_and_a_late_message_leave_no_trace(how: str, start: Any) -> None:
    publisher = start()
    async with following(publisher.endpoints, NEVER_QUIET) as (sink, source):
        first = await subscribed(publisher, sink, source)
        for n in range(first, first + 20):
            publisher.publish(name(n), how if n - first in (7, 8, 15) else "send")
        await until(lambda: len(sink.seen) >= first + 20, sink)
        assert sink.seen == list(range(first + 20))
        assert source.stats.gaps + source.stats.repeated > 0 and source.stats.lost == 0


async def test_a_lost_last_message_is_noticed_in_the_silence_after_it(start: Any) -> None:
    publisher = start()
    async with following(publisher.endpoints) as (sink, source):
        publisher.publish(name(0))
        await until(lambda: sink.seen == [0], sink)
        publisher.publish(name(1), "drop")
        await until(lambda: sink.seen == [0, 1], sink)
        assert source.stats.gaps == 0


async def test_what_nobody_has_any_more_makes_everything_before_unknown(start: Any) -> None:
    publisher = start(buffer=5)
    async with following(publisher.endpoints) as (sink, source):
        publisher.publish(name(0))
        await until(lambda: sink.seen == [0], sink)
        for n in range(1, 30):
            publisher.publish(name(n), "drop")
        publisher.publish(name(30))
        await until(lambda: sink.seen[-1:] == [30], sink)
        lost = sink.seen.index("lost")
        assert sink.seen[:lost] == [0] or sink.seen[:lost] == list(range(lost))
        after = sink.seen[lost + 1 :]
        assert after == list(range(after[0], 31))
        assert source.stats.lost == 1


async def test_messages_dropped_within_a_replay_are_asked_for_again(start: Any) -> None:
    publisher = start(buffer=20_000)
    for n in range(6000):
        publisher.publish(name(n))
    async with following(publisher.endpoints) as (sink, _):
        await until(lambda: len(sink.seen) >= 6000, sink)
        assert sink.seen == list(range(6000))


@pytest.mark.parametrize("published", [3, 10, 11, 30])
async def test_a_publisher_that_starts_over_is_noticed_wherever_its_numbers_stand(published: int, start: Any) -> None:
    publisher = start()
    async with following(publisher.endpoints) as (sink, _):
        for n in range(10):
            publisher.publish(name(n))
        await until(lambda: len(sink.seen) == 10, sink)
        publisher.stop()
        again = start()
        for n in range(100, 100 + published):
            again.publish(name(n))
        await until(lambda: sink.seen[-1:] == [99 + published], sink)
        assert sink.seen == [*range(10), "lost", *range(100, 100 + published)]


async def test_without_a_replay_endpoint_a_gap_makes_everything_before_unknown(start: Any) -> None:
    publisher = start()
    async with following(dataclasses.replace(publisher.endpoints, replay="")) as (sink, _):
        # Nobody knows when the subscription is in force.
        number = 0
        async with asyncio.timeout(DEADLINE_S):
            while not sink.seen:
                publisher.publish(name(number))
                number += 1
                await asyncio.sleep(0.02)
        publisher.publish(name(number), "drop")
        publisher.publish(name(number + 1))
        await until(lambda: sink.seen[-1:] == [number + 1], sink)
        assert sink.seen[-2] == "lost"
        assert number not in sink.seen


async def test_a_replay_that_nobody_answers_gives_up_what_is_missing_and_goes_on(start: Any, tmp_path: Path) -> None:
    publisher = start()
    endpoints = dataclasses.replace(publisher.endpoints, replay=f"ipc://{tmp_path}/nobody")
    async with following(endpoints) as (sink, _):
        publisher.publish(name(0))
        publisher.publish(name(1))
        await asyncio.sleep(0.2)
        for n in range(2, 5):
            publisher.publish(name(n), "drop")
        publisher.publish(name(5))
        publisher.publish(name(6))
        await until(lambda: sink.seen[-1:] == [6], sink)
        assert sink.seen[-2:] == [5, 6] and 3 not in sink.seen


async def test_an_engine_that_says_nothing_is_waited_for(start: Any) -> None:
    publisher = start()
    async with following(publisher.endpoints) as (sink, source):
        await until(lambda: source.stats.replays >= 3, sink)
        assert sink.seen == []
        publisher.publish(name(0))
        await until(lambda: sink.seen == [0], sink)

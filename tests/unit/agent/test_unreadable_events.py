"""Events that a newer vLLM changed: what they may have said of blocks that are gone is never passed over."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest

from tests.conformance.block_index import EPOCH, HOLDER, POOL
from tests.unit.agent.publisher import CLEARED, removed, stored
from tests.unit.agent.test_block_truth import block, key
from vllm_pd.agent.cache_feed import CacheFeed
from vllm_pd.state import MemoryBlockIndex

UNKNOWN = {"type": "BlockMoved", "block_hashes": 7}
CHANGED = [
    {"type": "BlockRemoved", "block_hashes": {"first": block(1), "count": 2}, "medium": "GPU"},
    {"type": "BlockRemoved", "hashes": [block(1)]},
    {"type": "BlockStored", "block_hashes": "all"},
    ["BlockRemoved", [block(1)], "GPU"],
    {"block_hashes": [block(1)]},
]


@pytest.fixture
def feed() -> CacheFeed:
    writer = MemoryBlockIndex("default").writer(POOL, HOLDER, EPOCH, 60_000)
    made = CacheFeed(HOLDER, writer, None, ttl_ms=60_000, renew_s=20.0)
    made.message(message(stored([block(1), block(2)]), stored([block(2)], "CPU")))
    assert claimed(made) == {key(1), key(2)}
    return made


def message(*events: Any) -> bytes:
    return msgspec.msgpack.encode([0.0, events, 0])


def claimed(feed: CacheFeed) -> set[bytes]:
    return {data[at : at + 15] for data in feed.truth.held().values() for at in range(0, len(data), 15)}


@pytest.mark.parametrize("event", CHANGED)
def test_after_an_event_of_a_known_kind_that_cannot_be_read_only_what_follows_is_claimed(
    feed: CacheFeed, event: Any
) -> None:
    feed.message(message(stored([block(3)]), event, stored([block(4)]), UNKNOWN))
    assert claimed(feed) == {key(4)}
    feed.message(message(stored([block(5)]), removed([block(1), block(4)])))
    assert claimed(feed) == {key(5)}
    assert feed.unreadable == 2


def test_a_whole_message_that_cannot_be_read_costs_what_was_known(feed: CacheFeed) -> None:
    feed.message(b"no message")
    assert claimed(feed) == set()
    assert feed.unreadable == 1


def test_events_of_other_kinds_cost_nothing(feed: CacheFeed) -> None:
    feed.message(message(UNKNOWN, stored([block(3)]), UNKNOWN))
    assert claimed(feed) == {key(1), key(2), key(3)}
    assert feed.unreadable == 2
    feed.message(message(CLEARED, UNKNOWN))
    assert claimed(feed) == {key(2)}


def test_a_loss_is_said_once_and_also_after_events_of_other_kinds(
    feed: CacheFeed, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    for event in (UNKNOWN, UNKNOWN, *CHANGED, UNKNOWN):
        feed.message(message(event))
    levels = [record.levelno for record in caplog.records]
    assert levels == [logging.WARNING, logging.ERROR]
    assert "install the vllm-pd that belongs to this vLLM" in caplog.text


def test_memory_is_bounded_by_what_came_since_although_no_removal_can_be_read(feed: CacheFeed) -> None:
    for start in range(10, 5000, 10):
        feed.message(message(stored([block(n) for n in range(start, start + 10)]), CHANGED[0]))
    assert len(feed.truth) == 0

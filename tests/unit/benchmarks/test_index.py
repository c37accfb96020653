"""The parts of `benchmarks.index` that decide whether its figures mean something."""

from __future__ import annotations

from benchmarks.index import flow, lookups
from benchmarks.index_processes import LAST, MESSAGE_BLOCKS, messages, probe, probes
from vllm_pd.agent.block_truth import BlockTruth
from vllm_pd.agent.kv_events import decode
from vllm_pd.block_hash import KEY_BYTES


def test_messages_are_what_an_agent_reads_and_keep_a_full_cache_full() -> None:
    fill, payloads = messages(3, 10, 4 * MESSAGE_BLOCKS)
    truth, last = BlockTruth(), b""
    for payload in fill:
        truth.apply(decode(payload).events)
    assert len(truth) == 4 * MESSAGE_BLOCKS
    for payload in payloads:
        batch = decode(payload)
        assert not batch.unreadable
        blocks = truth.apply(batch.events).blocks
        assert len(blocks) == 2 * MESSAGE_BLOCKS
        last = b"".join(key for key, bits in blocks.items() if bits)
    assert len(truth) == 4 * MESSAGE_BLOCKS
    assert probes(last) == [(3, LAST)]


def test_probes_are_found_among_other_keys() -> None:
    keys = [b"\x00" * KEY_BYTES, probe(1, 5)[:KEY_BYTES], b"\xff" * KEY_BYTES, probe(2, 6)[:KEY_BYTES]]
    assert probes(b"".join(keys)) == [(1, 5), (2, 6)]
    assert probes(b"") == []


def test_a_small_flow_ends_with_everything_right() -> None:
    row = flow(2, 20_000.0, 0.5)
    assert row["right"]
    assert row["applied_per_s"] > 0
    assert 0 < row["delay_p50_ms"] <= row["delay_p99_ms"]
    assert 16 < row["store_bytes"] < 30


def test_a_looked_up_prompt_is_held_as_the_title_says() -> None:
    assert {row["prompt"]: row["holders"] for row in lookups(4, 1)} == {"one": 4, "staggered": 4, "all": 4, "none": 0}

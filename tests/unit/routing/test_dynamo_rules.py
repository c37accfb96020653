"""Dynamo's own decisions at the boundaries: what its documents and its unit tests say comes out here."""

from __future__ import annotations

import pytest

from vllm_pd.routing.dynamo_rules import new_bypass, old_remote


@pytest.mark.parametrize(
    ("prompt", "hit_rate", "queue", "remote"),
    [
        (1001, 0.0, 0, True),
        (1000, 0.0, 0, False),  # strictly longer
        (2000, 0.5, 0, False),
        (2002, 0.5, 0, True),
        (2001, 0.5, 0, False),  # rounded down
        (8000, 1.0, 0, False),
        (8000, 0.0, 1, True),
        (8000, 0.0, 2, False),  # strictly shorter queue
        (8000, 0.0, 3, False),
        (0, 0.0, 0, False),
    ],
)
def test_old_rule(prompt: int, hit_rate: float, queue: int, remote: bool) -> None:
    assert old_remote(prompt, hit_rate, queue) is remote


def test_old_rule_as_its_shipped_file_sets_it() -> None:
    assert old_remote(11, 0.0, 0, max_local=10)
    assert not old_remote(10, 0.0, 0, max_local=10)
    assert not old_remote(11, 0.0, 0, max_local=10, max_queue=0)


@pytest.mark.parametrize(
    ("prompt", "blocks", "ratio", "bypass"),
    [
        (1000, 14, 0.7, True),  # 104 tokens, a tenth
        (100_000, 1000, 0.99, False),  # 36,000 tokens
        (200, 0, 0.7, False),  # the whole prompt
        (2048, 0, 0.99, False),  # as many as the threshold
        (2047, 0, 1.01, True),
        (0, 0, 0.7, True),
        (500, 10, 0.7, True),  # more held than there is
        (1000, 3, 0.808, False),  # 808 tokens: the ratio is strict
        (1000, 3, 0.809, True),
    ],
)
def test_new_rule_by_length(prompt: int, blocks: int, ratio: float, bypass: bool) -> None:
    assert new_bypass(prompt, blocks, 64, ratio=ratio) is bypass


@pytest.mark.parametrize(("busy", "bypass"), [(None, False), (False, False), (True, True)])
@pytest.mark.parametrize("prompt", [1000, 100_000])
def test_new_rule_by_load_alone_looks_at_no_length(prompt: int, busy: bool | None, bypass: bool) -> None:
    assert new_bypass(prompt, 0, 64, prefill_busy=busy, threshold=0) is bypass


@pytest.mark.parametrize(
    ("prompt", "blocks", "busy", "bypass"),
    [
        (1000, 14, False, True),
        (1000, 14, True, True),
        (100_000, 0, False, False),
        (100_000, 0, True, True),
        (1000, 14, None, True),
        (100_000, 0, None, False),
    ],
)
def test_new_rule_by_length_or_load(prompt: int, blocks: int, busy: bool | None, bypass: bool) -> None:
    assert new_bypass(prompt, blocks, 64, prefill_busy=busy) is bypass


@pytest.mark.parametrize(("full", "bypass"), [(None, True), (False, True), (True, False)])
def test_full_decode_worker_never_prefills(full: bool | None, bypass: bool) -> None:
    assert new_bypass(1000, 14, 64, prefill_busy=True, decode_busy=full) is bypass

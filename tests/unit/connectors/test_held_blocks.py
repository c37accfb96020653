"""A hold is let go by its key, whenever the release comes, and once."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_pd.connectors import held_blocks
from vllm_pd.connectors.held_blocks import REMEMBER_S, HeldBlocks


def finished(held: HeldBlocks, request: str, key: str) -> None:
    held.arrived(request, key)
    held.finished(request, True)


def test_what_is_held_goes_with_the_next_step() -> None:
    held = HeldBlocks()
    finished(held, "r", "k")
    assert held.take_leaving() == ()
    held.release(["k", "unknown"], 0.0)
    assert held.take_leaving() == ("r",)
    assert held.take_leaving() == ()


@pytest.mark.parametrize("arrived_before", [True, False])
def test_a_release_that_overtakes_the_end_of_its_prefill_counts(arrived_before: bool) -> None:
    held = HeldBlocks()
    if arrived_before:
        held.arrived("r", "k")
    held.release(["k"], 0.0)
    if not arrived_before:
        held.arrived("r", "k")
    assert held.take_leaving() == ()
    held.finished("r", True)
    assert held.take_leaving() == ("r",)


def test_a_request_that_keeps_nothing_is_not_let_go() -> None:
    held = HeldBlocks()
    held.arrived("r", "k")
    held.finished("r", False)
    held.release(["k"], 0.0)
    assert held.take_leaving() == ()


def test_a_request_without_a_key_is_none_of_its_business() -> None:
    held = HeldBlocks()
    held.finished("r", True)
    held.gone(["r"])
    held.release([""], 0.0)
    assert held.take_leaving() == ()


def test_two_requests_of_one_key_go_together() -> None:
    """The second attempt at a job that its first worker had finished after all."""
    held = HeldBlocks()
    finished(held, "first", "k")
    finished(held, "second", "k")
    held.gone(["first"])
    finished(held, "third", "k")
    held.release(["k"], 0.0)
    assert set(held.take_leaving()) == {"second", "third"}


def test_a_key_is_forgotten_after_a_while() -> None:
    held = HeldBlocks()
    held.release(["k"], 0.0)
    held.release(["other"], REMEMBER_S)
    finished(held, "r", "k")
    assert held.take_leaving() == ()


def test_the_keys_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_blocks, "MAX_REMEMBERED", 2)
    held = HeldBlocks()
    held.release(["a", "b", "c"], 0.0)
    for key in "abc":
        finished(held, f"of {key}", key)
    assert held.take_leaving() == ("of b", "of c")


REQUESTS = {f"r{n}": f"k{n // 2}" for n in range(6)}


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("release"), st.sampled_from(sorted(set(REQUESTS.values())))),
            st.tuples(st.sampled_from(["finish", "read", "step"]), st.sampled_from(sorted(REQUESTS))),
        )
    )
)
def test_in_any_order_each_request_goes_at_most_once_and_if_its_key_was_released(acts: list[tuple[str, str]]) -> None:
    held, left, released, kept, read = HeldBlocks(), Counter[str](), set(), set(), set()
    for request, key in REQUESTS.items():
        held.arrived(request, key)
    for act, name in [*acts, ("step", "")]:
        if act == "release":
            held.release([name], 0.0)
            released.add(name)
        elif act == "finish" and name not in kept:
            held.finished(name, True)
            kept.add(name)
        elif act == "read" and name in kept:
            held.gone([name])
            read.add(name)
        elif act == "step":
            left.update(held.take_leaving())
    # The engine ignores those that were read in the meantime.
    assert {r for r in left if r not in read} == {r for r in kept - read if REQUESTS[r] in released}

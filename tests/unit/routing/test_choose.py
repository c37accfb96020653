from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from tests.unit.routing.engines import engine, send
from vllm_pd.routing.choose import Affinity, choose
from vllm_pd.routing.model import Ask, Overlap
from vllm_pd.routing.policies import POLICIES
from vllm_pd.state.base import WorkerId

ASK = Ask(100, 10)
PREDICTED = POLICIES["predicted"]


def test_no_candidate_is_an_error() -> None:
    with pytest.raises(ValueError, match="no candidate"):
        choose(PREDICTED, ASK, [], {}, 0.0)


def test_the_only_candidate_is_taken() -> None:
    assert choose(PREDICTED, ASK, [engine("a")], {}, 0.0).reason == "only one"


def test_of_equals_the_one_picked_longest_ago() -> None:
    engines = [engine("a", last_pick=3), engine("b", last_pick=1), engine("c", last_pick=2)]
    choice = choose(PREDICTED, ASK, engines, {}, 0.0)
    assert (choice.chosen, choice.reason) == (1, "tie: picked longest ago")


def test_the_chosen_one_is_described_and_all_only_on_demand() -> None:
    engines = [engine("a"), engine("b")]
    overlaps = {engines[1].holder: Overlap(gpu=3, cpu=2)}
    choice = choose(PREDICTED, ASK, engines, overlaps, 0.0)
    assert (choice.chosen, choice.reason, choice.policy, choice.scored) == (1, "lowest", "predicted", ())
    assert (choice.best.holder, choice.best.overlap, choice.best.uncached) == (engines[1].holder, Overlap(3, 2), 50)
    assert choice.best.ttft == pytest.approx(0.052)
    explained = choose(PREDICTED, ASK, engines, overlaps, 0.0, explain=True)
    assert [scored.holder for scored in explained.scored] == [each.holder for each in engines]
    assert explained.scored[explained.chosen] == explained.best
    assert replace(explained.best, parts={}) == choice.best


@pytest.mark.parametrize("name", POLICIES)
def test_unknown_overlap_is_no_overlap_under_any_policy(name: str) -> None:
    engines = [engine("a"), engine("b")]
    choice = choose(POLICIES[name], replace(ASK, exact=False), engines, {engines[1].holder: Overlap(9)}, 0.0)
    assert (choice.chosen, choice.best.overlap.blocks) == (0, 0)


@pytest.mark.parametrize("name", POLICIES)
def test_empty_prompt_is_placed(name: str) -> None:
    engines = [engine("a"), engine("b")]
    assert choose(POLICIES[name], Ask(0, 10), engines, {engines[1].holder: Overlap(1)}, 0.0, explain=True).scored


class TestTemperature:
    def draws(self, temperature: float, seed: int = 0, count: int = 2000) -> list[int]:
        engines = [engine("a"), engine("b"), engine("c")]
        overlaps = {engines[0].holder: Overlap(8), engines[1].holder: Overlap(4)}
        random = Random(seed)
        return [
            choose(PREDICTED, ASK, engines, overlaps, 0.0, temperature=temperature, random=random).chosen
            for _ in range(count)
        ]

    def test_zero_takes_the_best(self) -> None:
        assert set(self.draws(0.0, count=50)) == {0}

    def test_draws_by_softmax_over_scores_from_0_to_1(self) -> None:
        """Scores 0, 1/2 and 1 at temperature 1/2: odds of 1, 1/e and 1/e²."""
        taken = Counter(self.draws(0.5))
        assert [taken[index] / 2000 for index in range(3)] == pytest.approx([0.665, 0.245, 0.09], abs=0.03)

    def test_low_temperature_is_nearly_always_the_best(self) -> None:
        assert Counter(self.draws(0.05))[0] > 1990

    def test_the_same_seed_draws_the_same(self) -> None:
        assert self.draws(1.0, seed=5, count=100) == self.draws(1.0, seed=5, count=100)
        assert self.draws(1.0, seed=5, count=100) != self.draws(1.0, seed=6, count=100)

    def test_equals_are_drawn_evenly(self) -> None:
        engines, random = [engine(name) for name in "abcd"], Random(1)
        taken = Counter(
            choose(PREDICTED, ASK, engines, {}, 0.0, temperature=0.1, random=random).chosen for _ in range(2000)
        )
        assert all(count == pytest.approx(500, abs=80) for count in taken.values())

    def test_needs_a_generator(self) -> None:
        with pytest.raises(ValueError, match="random"):
            choose(PREDICTED, ASK, [engine("a"), engine("b")], {}, 0.0, temperature=1.0)


class TestSession:
    ask = replace(ASK, session=WorkerId("b"))

    def test_stays_on_its_worker(self) -> None:
        engines = [engine("a"), engine("b", decoding=9)]
        choice = choose(PREDICTED, self.ask, engines, {}, 0.0)
        assert (choice.chosen, choice.reason) == (1, "session")

    def test_leaves_a_worker_where_it_would_wait_much_longer(self) -> None:
        engines = [engine("a"), engine("b")]
        send(engines[1], "r", 1000, 0.0)
        choice = choose(PREDICTED, self.ask, engines, {}, 0.0)
        assert (choice.chosen, choice.reason) == (0, "lowest")
        patient = choose(PREDICTED, self.ask, engines, {}, 0.0, affinity=Affinity(factor=1.0, margin=2.0))
        assert patient.reason == "session"

    def test_a_worker_that_is_gone_is_no_candidate(self) -> None:
        assert choose(PREDICTED, self.ask, [engine("a"), engine("c")], {}, 0.0).reason.startswith("tie")

    def test_goes_to_the_rank_of_its_worker_that_holds_more(self) -> None:
        engines = [engine("a"), engine("b", rank=0), engine("b", rank=1)]
        assert choose(PREDICTED, self.ask, engines, {engines[2].holder: Overlap(1)}, 0.0).chosen == 2

    def test_is_kept_by_every_policy(self) -> None:
        engines = [engine("a"), engine("b", last_pick=1)]
        assert choose(POLICIES["round-robin"], self.ask, engines, {}, 0.0).chosen == 1

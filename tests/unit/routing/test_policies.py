from __future__ import annotations

import pytest

from tests.unit.routing.engines import SIMPLE, engine, keys, send
from vllm_pd.errors import SettingsError
from vllm_pd.routing.choose import choose
from vllm_pd.routing.model import Ask, Overlap, Rates
from vllm_pd.routing.policies import POLICIES, policy, weight_names

ASK = Ask(100, 10)


def test_every_policy_is_there_by_name() -> None:
    assert set(POLICIES) == {
        "predicted",
        "least-loaded",
        "round-robin",
        "prefix",
        "dynamo-v0.1",
        "dynamo-v0.4",
        "dynamo-v1",
        "llm-d",
    }


def test_weights_are_replaced_by_name() -> None:
    made = policy("predicted", [("work", 3.0)])
    assert getattr(made, "work") == 3.0  # noqa: B009 - a policy in general has no such weight
    assert "work" in weight_names(made)


@pytest.mark.parametrize(
    ("name", "weights", "message"),
    [
        ("fastest", [], "choose one of predicted, "),
        ("predicted", [("overlap", 1.0)], "it has work"),
        ("round-robin", [("work", 1.0)], "it has none"),
    ],
)
def test_unknown_policy_or_weight_names_what_there_is(
    name: str, weights: list[tuple[str, float]], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        policy(name, weights)


@pytest.mark.parametrize("name", POLICIES)
def test_terms_add_up_to_what_explains_the_score(name: str) -> None:
    engines = [engine("a"), engine("b", waiting=3, kv_usage=0.5, active_blocks=40, inflight=5, decoding=2)]
    send(engines[1], "r", 500, 0.0)
    overlaps = {engines[0].holder: Overlap(3, 2, 1)}
    choice = choose(POLICIES[name], ASK, engines, overlaps, 0.0, explain=True)
    sign = -1 if name in ("dynamo-v0.1", "llm-d") else 1
    if name in ("predicted", "dynamo-v0.1", "dynamo-v0.4", "dynamo-v1", "llm-d"):
        for scored in choice.scored:
            assert sign * sum(scored.parts.values()) == pytest.approx(scored.score)


class TestPredicted:
    def test_goes_where_the_prefix_is(self) -> None:
        engines = [engine("a"), engine("b")]
        assert choose(POLICIES["predicted"], ASK, engines, {engines[1].holder: Overlap(8)}, 0.0).chosen == 1

    def test_a_queue_longer_than_the_prefix_is_worth_sends_it_elsewhere(self) -> None:
        engines = [engine("a"), engine("b")]
        overlaps = {engines[1].holder: Overlap(8)}
        for n in range(3):
            send(engines[1], f"r{n}", 100, 0.0)
        assert choose(POLICIES["predicted"], ASK, engines, overlaps, 0.0).chosen == 0
        engines[1].first_token("r0", 0.1)
        engines[1].first_token("r1", 0.2)
        assert choose(POLICIES["predicted"], ASK, engines, overlaps, 0.25).chosen == 1

    def test_loading_from_a_slow_tier_counts(self) -> None:
        engines = [engine("a"), engine("b"), engine("c")]
        overlaps = {engines[0].holder: Overlap(ssd=9), engines[1].holder: Overlap(cpu=8), engines[2].holder: Overlap(1)}
        choice = choose(POLICIES["predicted"], ASK, engines, overlaps, 0.0, explain=True)
        assert choice.chosen == 1
        assert [round(scored.ttft, 3) for scored in choice.scored] == [0.1, 0.028, 0.09]

    def test_a_faster_engine_gets_more(self) -> None:
        fast = Rates(prefill_base=0.0, prefill_token=0.0001, prefill_square=0.0, prefill_context=0.0)
        engines = [engine("slow"), engine("fast", rates=fast)]
        assert choose(POLICIES["predicted"], ASK, engines, {engines[0].holder: Overlap(8)}, 0.0).chosen == 1

    def test_siblings_of_a_burst_go_together(self) -> None:
        engines = [engine("a"), engine("b")]
        ask = Ask(105, 10, keys=keys(*range(10)))
        engines[1].begin("first", ask, Overlap(), 0.0)
        choice = choose(POLICIES["predicted"], ask, engines, {}, 0.0)
        assert (choice.chosen, choice.best.promised, choice.best.uncached) == (1, 10, 5)

    def test_short_request_waits_only_for_what_goes_before_it(self) -> None:
        """Both have the same work waiting, but one is an engine where a short request goes before a long one."""
        engines = [engine("as they come"), engine("ordered", ordered=True)]
        for each in engines:
            send(each, "computed", 100, 0.0, patience=2.0)
            send(each, "long", 5000, 0.0, patience=2.0)
        choice = choose(POLICIES["predicted"], ASK, engines, {}, 0.0, explain=True)
        assert (choice.chosen, choice.patience) == (1, 2.0)
        assert [scored.ttft for scored in choice.scored] == pytest.approx([5.2, 0.2])
        assert [scored.parts["overtaken"] for scored in choice.scored] == pytest.approx([0.0, 0.1])

    def test_sequences_that_decode_are_spared_a_long_prefill(self) -> None:
        engines = [engine("a", decoding=50), engine("b")]
        assert choose(POLICIES["predicted"], ASK, engines, {engines[0].holder: Overlap(1)}, 0.0).chosen == 1

    def test_sequences_of_others_count_as_far_as_the_engine_reports_them(self) -> None:
        """Clients that ask an engine directly, other routers, requests from before this router's restart."""
        engines = [engine("a"), engine("b")]
        engines[0].report(running=5, waiting=0, kv_usage=0.1, now=0.0)
        for n in range(4):
            assert choose(POLICIES["predicted"], ASK, engines, {}, 10.0 * n).chosen == 1
            send(engines[1], f"r{n}", 100, 10.0 * n, pick=n + 1)
            engines[1].finish(f"r{n}", 10.0 * n + 1)


class TestDynamoV01:
    def test_logit(self) -> None:
        engines = [engine("a", kv_usage=0.25, waiting=1), engine("b", kv_usage=0.5, waiting=4)]
        choice = choose(POLICIES["dynamo-v0.1"], ASK, engines, {engines[1].holder: Overlap(9)}, 0.0, explain=True)
        assert [scored.score for scored in choice.scored] == pytest.approx([0.25 + 0.25, -1.8 + 0.5 + 1.0])
        assert choice.chosen == 1

    def test_nobody_waiting_is_no_error(self) -> None:
        assert choose(POLICIES["dynamo-v0.1"], ASK, [engine("a"), engine("b")], {}, 0.0).chosen == 0

    def test_what_was_sent_since_the_report_counts_as_waiting(self) -> None:
        engines = [engine("a", kv_blocks=100), engine("b", kv_blocks=100)]
        send(engines[0], "r", 100, 0.0)
        assert choose(POLICIES["dynamo-v0.1"], ASK, engines, {}, 0.0).chosen == 1
        engines[0].report(running=1, waiting=0, kv_usage=0.0, now=1.0)
        assert choose(POLICIES["dynamo-v0.1"], ASK, engines, {}, 1.0).reason.startswith("tie")


class TestDynamoV04:
    def test_worked_example(self) -> None:
        """Costs 8+10, 5+5 and 2+9 without the new request's own blocks, which all have: the second is chosen."""
        engines = [engine("w1", active_blocks=10), engine("w2", active_blocks=5), engine("w3", active_blocks=9)]
        overlaps = {engines[0].holder: Overlap(2), engines[1].holder: Overlap(5), engines[2].holder: Overlap(8)}
        choice = choose(POLICIES["dynamo-v0.4"], ASK, engines, overlaps, 0.0, explain=True)
        assert [scored.score - ASK.blocks for scored in choice.scored] == [18, 10, 11]
        assert choice.chosen == 1

    def test_weight_zero_is_load_only(self) -> None:
        engines = [engine("w1", active_blocks=10), engine("w2", active_blocks=5)]
        made = policy("dynamo-v0.4", [("overlap_weight", 0.0)])
        assert choose(made, ASK, engines, {engines[0].holder: Overlap(9)}, 0.0).chosen == 1

    def test_prompt_shorter_than_its_overlap_does_not_go_below_zero(self) -> None:
        engines = [engine("a"), engine("b")]
        choice = choose(
            POLICIES["dynamo-v0.4"], Ask(5, 10), engines, {engines[0].holder: Overlap(3)}, 0.0, explain=True
        )
        assert choice.scored[0].parts["prefill_blocks"] == 0


class TestDynamoV1:
    def cost(self, overlap: Overlap, weights: dict[str, float], **load: int) -> float:
        engines = [engine("a", **load), engine("idle")]
        made = policy("dynamo-v1", weights.items())
        return choose(made, ASK, engines, {engines[0].holder: overlap}, 0.0, explain=True).scored[0].score

    @pytest.mark.parametrize(
        ("overlap", "credit"),
        [
            (Overlap(), 0.0),
            (Overlap(gpu=4), 4.0),
            (Overlap(cpu=4), 3.0),
            (Overlap(ssd=4), 1.0),
            (Overlap(4, 4, 2), 7.5),
        ],
    )
    def test_credit_by_tier(self, overlap: Overlap, credit: float) -> None:
        assert self.cost(overlap, {}) == pytest.approx(10 - credit + 10)

    def test_credit_for_gpu_blocks_decays_with_the_prefill_queued_beyond_the_least_busy(self) -> None:
        """Twice the request's blocks queued: the credit is a third with a decay of 1."""
        assert self.cost(Overlap(6), {"credit_decay": 1.0}, prefill_tokens=200) == pytest.approx(30 - 2 + 10)

    def test_credit_never_makes_the_prefill_negative(self) -> None:
        assert self.cost(Overlap(10), {"gpu_credit": 3.0}) == pytest.approx(10)

    def test_prefill_scale_and_active_requests(self) -> None:
        weights = {"prefill_scale": 0.5, "request_weight": 2.0}
        assert self.cost(Overlap(), weights, inflight=3) == pytest.approx(5 + 10 + 6)


class TestLlmD:
    def test_weighted_scorers(self) -> None:
        engines = [engine("a", waiting=0, kv_usage=0.5), engine("b", waiting=4, kv_usage=0.0)]
        choice = choose(POLICIES["llm-d"], ASK, engines, {engines[1].holder: Overlap(10)}, 0.0, explain=True)
        assert [scored.score for scored in choice.scored] == pytest.approx([-(0 + 2 + 1), -(3 + 0 + 2)])

    def test_equal_queues_all_score_full(self) -> None:
        engines = [engine("a", waiting=7), engine("b", waiting=7)]
        choice = choose(POLICIES["llm-d"], ASK, engines, {}, 0.0, explain=True)
        assert all(scored.parts["queue"] == 2.0 for scored in choice.scored)


class TestPlainOnes:
    def test_least_loaded_counts_a_waiting_request_four_times_and_cache_use_last(self) -> None:
        engines = [
            engine("a", running=4),
            engine("b", waiting=1, kv_usage=0.1),
            engine("c", running=3, kv_usage=0.9),
            engine("d", running=3, kv_usage=0.2),
        ]
        assert choose(POLICIES["least-loaded"], ASK, engines, {}, 0.0).chosen == 3

    def test_round_robin_takes_each_in_turn(self) -> None:
        engines = [engine(name, rates=SIMPLE) for name in "abc"]
        taken = []
        for pick in range(1, 7):
            index = choose(POLICIES["round-robin"], ASK, engines, {}, 0.0).chosen
            send(engines[index], f"r{pick}", 100, 0.0, pick=pick)
            taken.append(index)
        assert taken == [0, 1, 2, 0, 1, 2]

    def test_prefix_takes_the_longest_overlap_and_of_equals_the_least_loaded(self) -> None:
        engines = [engine("a", running=9), engine("b", running=3), engine("c")]
        overlaps = {engines[0].holder: Overlap(5), engines[1].holder: Overlap(5), engines[2].holder: Overlap(4)}
        assert choose(POLICIES["prefix"], ASK, engines, overlaps, 0.0).chosen == 1

"""Waiting requests are taken by priority, as vLLM does with `--scheduling-policy priority`."""

from __future__ import annotations

import pytest

from vllm_pd.sim.engine import Engine
from vllm_pd.sim.timing import TimingModel
from vllm_pd.sim.trace import made_key
from vllm_pd.sim.work import EngineConfig, Work

SIZE = 16


def order_of_first_tokens(scheduling_policy: str, priorities: list[float]) -> list[object]:
    """Prompts of one step each, all there before the first begins."""
    config = EngineConfig(
        gpu_blocks=1000, block_size=SIZE, max_num_batched_tokens=160, scheduling_policy=scheduling_policy
    )
    engine = Engine(config, TimingModel())
    for n, priority in enumerate(priorities):
        engine.add(Work(n, 160, 1, [made_key(100 * n + i) for i in range(10)], priority=priority))
    order: list[object] = []
    now = 0.0
    while not engine.idle:
        step = engine.begin(now)
        assert step is not None
        now = step.ends
        order += [work.tag for work in engine.end().first_tokens]
    return order


@pytest.mark.parametrize(
    ("policy", "priorities", "order"),
    [
        ("priority", [3.0, 1.0, 2.0], [1, 2, 0]),
        ("priority", [1.0, 1.0, 0.0, 1.0], [2, 0, 1, 3]),
        ("fcfs", [3.0, 1.0, 2.0], [0, 1, 2]),
    ],
)
def test_smallest_priority_first_and_of_equals_the_first_to_come(
    policy: str, priorities: list[float], order: list[int]
) -> None:
    assert order_of_first_tokens(policy, priorities) == order


def test_a_prompt_being_computed_is_not_interrupted() -> None:
    engine = Engine(EngineConfig(gpu_blocks=1000, block_size=SIZE, max_num_batched_tokens=160), TimingModel())
    long = Work("long", 800, 1, [made_key(i) for i in range(50)], priority=9.0)
    engine.add(long)
    step = engine.begin(0.0)
    assert step is not None
    engine.add(Work("short", 16, 1, [made_key(1000)], priority=0.0))
    engine.end()
    order: list[object] = []
    now = step.ends
    while not engine.idle:
        step = engine.begin(now)
        assert step is not None
        now = step.ends
        order += [work.tag for work in engine.end().first_tokens]
    assert order == ["long", "short"]

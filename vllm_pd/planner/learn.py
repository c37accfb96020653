"""What a planner learns from what it sees: the demand's history, and how fast the workers really are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from vllm_pd.linear_law import LinearLaw
from vllm_pd.planner.capacity import Speed, StepLaw
from vllm_pd.planner.config import PlannerConfig
from vllm_pd.planner.long_history import remembered
from vllm_pd.planner.memory import Memory, Sample, StepSample
from vllm_pd.planner.model import PoolView, Traffic
from vllm_pd.planner.sight import Sight, known_loads
from vllm_pd.routing.model import Rates

_KEPT, _KEPT_STEPS = 120, 64
"""Samples of the history, and of the decode workers' steps."""
_KV_KILOTOKEN = 4e-5
"""Seconds to read the KV of a thousand tokens in a step, before anything was measured: 128 kB a token at 3.3 TB/s."""
_SMOOTH = 0.3
_ANSWERS_S = 60.0
"""After which an answer that ended counts e times less."""
_SURE, _MOST_WAITING = 0.5, 3.0


def learn(view: PoolView, sight: Sight, config: PlannerConfig) -> Memory:
    """The memory with what this view adds to it."""
    memory, traffic = sight.memory, view.traffic
    if traffic is None or traffic.age_s > config.stale_s or traffic.seconds <= 0:
        return memory
    seconds = sight.elapsed_s if memory.history else traffic.seconds
    if seconds <= 0:
        return memory
    sample = Sample(
        seconds,
        traffic.arrivals / traffic.seconds,
        traffic.prompt_tokens / traffic.seconds,
        traffic.uncached_tokens / traffic.seconds,
        _decoded(traffic, sight, memory, config),
        _load_of_decoders(view, sight, config)[2],
    )
    answer, answers = _answers(traffic, memory)
    memory = replace(
        memory,
        history=(*memory.history, sample)[-_KEPT:],
        ages=remembered(memory.ages, sample, view.at_s - traffic.age_s),
        answer=answer,
        answers=answers,
    )
    return _learn_steps(view, sight, traffic, memory, config)


def _decoded(traffic: Traffic, sight: Sight, memory: Memory, config: PlannerConfig) -> float:
    """Answer tokens a second that are asked of the decode workers.

    Answers last for minutes, so what is being given says more of the next minute than who arrives; and the length of
    those that ended lately tells of a mix of requests that is past. Who waits would be given as much as those that
    run. Where hardly anything is given yet, half of what those who arrive usually get is counted on.
    """
    given = traffic.output_tokens / traffic.seconds
    loads = known_loads(sight.decode + sight.both, config)
    running = sum(worker.running or 0 for worker in loads)
    waiting = sum(worker.waiting or 0 for worker in loads)
    if running and waiting:
        given *= min(_MOST_WAITING, 1.0 + waiting / running)
    return max(given, _SURE * traffic.arrivals / traffic.seconds * _answers(traffic, memory)[0])


def _answers(traffic: Traffic, memory: Memory) -> tuple[float, float]:
    """Tokens of an answer on average, and of how many that is known: those that ended longer ago count for less."""
    before = memory.answers * math.exp(-traffic.seconds / _ANSWERS_S)
    if traffic.mean_output is None or not traffic.finished:
        return memory.answer, before
    count = before + traffic.finished
    return (before * memory.answer + traffic.finished * traffic.mean_output) / count, count


def _load_of_decoders(view: PoolView, sight: Sight, config: PlannerConfig) -> tuple[float, float, float]:
    """Sequences and KV tokens of a decode worker, and the tokens of one sequence; 0 where that is not known."""
    decoders = sight.decode + sight.both
    loads = [worker for worker in known_loads(decoders, config) if worker.is_settled]
    if len(loads) * 2 < len(decoders) or not loads or not view.kv_tokens:
        return 0.0, 0.0, 0.0
    sequences = sum(worker.running or 0 for worker in loads) / len(loads)
    tokens = sum(worker.kv_usage or 0.0 for worker in loads) / len(loads) * view.kv_tokens
    return sequences, tokens, tokens / sequences if sequences > 0 else 0.0


def _learn_steps(view: PoolView, sight: Sight, traffic: Traffic, memory: Memory, config: PlannerConfig) -> Memory:
    """How long a decode step took with what the decode workers had, and how much KV a sequence needs."""
    sequences, tokens, held = _load_of_decoders(view, sight, config)
    if held > 0:
        usual = memory.held_tokens
        memory = replace(memory, held_tokens=held if usual is None else usual + _SMOOTH * (held - usual))
    itl = traffic.itl
    if itl is None or not itl.count or not itl.mean_s > 0 or sequences <= 0:
        return memory
    seen = StepSample(sequences, tokens / 1000, itl.mean_s)
    return replace(memory, steps=(*memory.steps, seen)[-_KEPT_STEPS:])


def speed(view: PoolView, memory: Memory) -> Speed:
    """How fast the pool's usual worker is."""
    rates = view.rates or Rates()
    return Speed(
        rates,
        step_law(rates, memory.steps),
        view.kv_tokens,
        memory.held_tokens,
        memory.prefill_factor,
        memory.decode_factor,
    )


def step_law(rates: Rates, seen: Sequence[StepSample]) -> StepLaw:
    """The rates of the routers say what a sequence adds to a step; how much of it is its KV is told from the steps."""
    law = LinearLaw((rates.step_base, rates.step_sequence, _KV_KILOTOKEN))
    if not seen:
        return StepLaw(rates.step_base, rates.step_sequence, _KV_KILOTOKEN)
    return StepLaw(*law.fit(((1.0, each.sequences, each.kv_kilotokens), each.itl_s) for each in seen))


def start_s(memory: Memory, config: PlannerConfig) -> float:
    """Seconds that a start is expected to take: as seen, else as the workers that are there say of theirs."""
    return memory.start_s or max(config.start_s, memory.startup_s or 0.0)


def answer_s(memory: Memory) -> float:
    """Seconds that a usual answer lasts; 0 while that is not known."""
    return memory.answer * memory.steps[-1].itl_s if memory.steps else 0.0

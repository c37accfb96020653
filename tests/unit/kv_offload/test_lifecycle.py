"""No block is reused while a copy touches it: preemption, abort, reset and shutdown, with the latest possible copies.

vLLM's own scheduler runs over `PDConnector` (see `mini_engine`); each step checks every byte that it computes from.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.unit.kv_offload import remote_loads
from tests.unit.kv_offload.mini_engine import BLOCK_TOKENS, MiniEngine, answer, prompt, prompts, settle
from vllm_pd.plugin import register
from vllm_pd.tier_choices import LoadGate

pytestmark = pytest.mark.vllm

Make = Callable[..., MiniEngine]


@pytest.fixture
def make(tiny_model: Path) -> Iterator[Make]:
    register()
    made: list[MiniEngine] = []

    def build(**options: Any) -> MiniEngine:
        made.append(MiniEngine(tiny_model, **options))
        return made[-1]

    yield build
    for engine in made:
        engine.stop()


@pytest.mark.parametrize("below", [False, True], ids=["cpu", "cpu and ssd"])
@pytest.mark.parametrize(
    ("seed", "window", "remote"),
    [*((seed, None, False) for seed in range(6)), (6, 64, False), (7, 100, False), (8, None, True), (9, 64, True)],
)
def test_every_answer_is_exact_whatever_happens_to_the_blocks(
    make: Make, below: bool, seed: int, window: int | None, remote: bool
) -> None:
    """Random prompts with common beginnings; the GPU holds two of them, host memory four."""
    chance = random.Random(seed)
    mode = LoadGate.AUTO if seed % 2 else LoadGate.ALWAYS
    engine = make(gpu_blocks=40, cpu_blocks=60, below=below, mode=mode, window=window, remote=remote)
    delays = engine.delays
    delays.store = lambda: chance.choice((0, 0, 1, 3, 8))
    delays.load = lambda: chance.choice((0, 1, 2, 6))
    delays.tier = lambda: chance.choice((0, 1, 3, 10))
    delays.lost = lambda: chance.random() < 0.05
    delays.early = lambda: chance.random() < 0.5
    draw, asked, aborted = prompts(chance, families=4, most_blocks=14), {}, set()
    resets: Counter[bool] = Counter()
    # Answers that outgrow the GPU.
    for number in range(7):
        asked[name := f"long{number}"] = prompt(5, 100 + number)
        engine.ask(name, asked[name], length=60)
    for number in range(70):
        name = f"{remote_loads.NAME if remote and chance.random() < 0.4 else 'r'}{number}"
        asked[name] = draw()
        engine.ask(name, asked[name], length=chance.choice((1, 3, 20)))
        for _ in range(chance.choice((0, 0, 1, 2, 12))):
            engine.step()
        if chance.random() < 0.15 and (alive := list(engine.scheduler.requests)):
            aborted.add(victim := chance.choice(alive))
            engine.abort(victim)
        if chance.random() < 0.1:
            resets[engine.reset()] += 1
        elif chance.random() < 0.05:
            engine.scheduler.reset_prefix_cache()
    engine.run()
    settle(engine)
    for name, tokens in asked.items():
        if name not in aborted:
            assert engine.answers[name] == answer(tokens, len(engine.answers[name])), name
            assert engine.answers[name], name
    assert engine.worker.loads
    assert resets[False], "no reset came while blocks were in use"


def fill(engine: MiniEngine, name: str, tokens: list[int]) -> None:
    engine.ask(name, tokens, length=1)
    engine.run()
    settle(engine)


def test_a_block_comes_from_the_ssd_once_and_from_host_memory_once_however_many_want_it(make: Make) -> None:
    engine = make(gpu_blocks=120, cpu_blocks=24, below=True)
    wanted = prompt(10)
    fill(engine, "first", wanted)
    for seed in (1, 2, 3):
        fill(engine, f"other{seed}", prompt(8, seed))
    assert engine.scheduler.reset_prefix_cache()
    held = engine.tier
    assert held is not None and not held.reads
    loaded = len(engine.worker.loads)
    engine.delays.tier = engine.delays.load = lambda: 4
    for number in range(5):
        engine.ask(f"again{number}", wanted + [number] * number, length=2)
        engine.step()
    engine.run()
    settle(engine)
    assert sorted(held.reads) == sorted(set(held.reads)) and len(held.reads) == 10
    copied = [int(chunk) for spec in engine.worker.loads[loaded:] for chunk in spec.block_ids]
    assert len(copied) == 10
    for number in range(5):
        assert engine.answers[f"again{number}"] == answer(wanted + [number] * number, 2)


def test_requests_that_share_a_beginning_with_one_being_loaded_wait_for_it(make: Make) -> None:
    """The longer one loads no more than its own end."""
    engine = make(gpu_blocks=120, cpu_blocks=60)
    long = prompt(12)
    fill(engine, "long", long)
    assert engine.scheduler.reset_prefix_cache()
    engine.delays.load = lambda: 5
    engine.ask("short", long[: 6 * BLOCK_TOKENS + 1], length=1)
    engine.step()
    engine.ask("whole", long, length=1)
    engine.run()
    assert [len(spec.block_ids) for spec in engine.worker.loads] == [6, 6]
    assert engine.answers["whole"] == answer(long, 1)


@pytest.mark.parametrize("early", [False, True])
def test_a_reset_lets_nothing_into_slots_that_are_still_written(make: Make, early: bool) -> None:
    """A store waits in the worker for the next step; that step's lookup would read from the SSD into the same slot."""
    engine = make(gpu_blocks=60, cpu_blocks=8, below=True)
    wanted = prompt(6)
    fill(engine, "wanted", wanted)
    fill(engine, "other", prompt(7, 1))
    engine.delays.store, engine.delays.early = (lambda: 5), (lambda: early)
    engine.ask("being stored", prompt(7, 2), length=2)
    engine.step()
    engine.step()
    assert engine.connector._gate is not None and engine.connector._gate._scheduler._jobs
    engine.reset()
    engine.ask("again", wanted, length=2)
    engine.run()
    settle(engine)
    assert engine.answers["again"] == answer(wanted, 2)
    assert engine.tier is not None and engine.tier.reads, "nothing came from below"


def test_two_resets_without_a_step_between_are_two_resets(make: Make) -> None:
    engine = make(gpu_blocks=60, cpu_blocks=60)
    engine.delays.store = lambda: 5
    engine.ask("being stored", prompt(7), length=9)
    for _ in range(4):
        engine.step()
    assert engine.connector._gate is not None and engine.connector._gate._scheduler._jobs
    for _ in range(2):
        assert not engine.reset(), "a request runs"
    engine.run()
    assert engine.answers["being stored"] == answer(prompt(7), 9)


def test_a_reset_lets_nothing_into_slots_that_are_still_read(make: Make) -> None:
    engine = make(gpu_blocks=60, cpu_blocks=8, below=True)
    first, second = prompt(6), prompt(6, 1)
    fill(engine, "second", second)
    fill(engine, "first", first)
    assert engine.scheduler.reset_prefix_cache()
    engine.delays.load, engine.delays.early = (lambda: 6), (lambda: True)
    engine.ask("first again", first, length=2)
    engine.step()
    assert len(engine.worker.loads) == 1
    assert not engine.reset(), "the request that is being loaded holds blocks"
    engine.ask("second again", second, length=2)
    engine.run()
    settle(engine)
    assert engine.answers["first again"] == answer(first, 2)
    assert engine.answers["second again"] == answer(second, 2)


def test_blocks_of_a_request_that_is_aborted_while_they_are_loaded_are_reused_only_afterwards(make: Make) -> None:
    engine = make(gpu_blocks=16, cpu_blocks=60)
    wanted = prompt(10)
    fill(engine, "wanted", wanted)
    assert engine.scheduler.reset_prefix_cache()
    engine.delays.load = lambda: 8
    engine.ask("aborted", wanted, length=2)
    engine.step()
    assert engine.worker.loads
    engine.abort("aborted")
    engine.ask("next", prompt(10, 1), length=2)
    engine.run()
    settle(engine)
    assert engine.answers["next"] == answer(prompt(10, 1), 2)
    assert engine.scheduler.reset_prefix_cache(), "a block was not given back"


def test_a_request_that_is_aborted_while_it_waits_for_the_ssd_leaves_nothing_behind(make: Make) -> None:
    engine = make(gpu_blocks=40, cpu_blocks=24, below=True)
    wanted = prompt(10)
    fill(engine, "wanted", wanted)
    for seed in (1, 2, 3):
        fill(engine, f"other{seed}", prompt(8, seed))
    assert engine.scheduler.reset_prefix_cache()
    engine.delays.tier = lambda: 5
    engine.ask("aborted", wanted, length=2)
    engine.step()
    assert engine.tier is not None and engine.tier.reads
    engine.abort("aborted")
    engine.run()
    settle(engine)
    gate = engine.connector._gate
    assert gate is not None and not gate._asked
    # What came is of use to the next one.
    before = len(engine.tier.reads)
    engine.ask("next", wanted, length=2)
    engine.run()
    assert engine.answers["next"] == answer(wanted, 2)
    assert len(engine.tier.reads) == before


def test_an_engine_that_stops_while_blocks_are_copied_ends_cleanly(make: Make) -> None:
    engine = make(gpu_blocks=40, cpu_blocks=24, below=True)
    engine.delays.store = engine.delays.tier = lambda: 50
    engine.ask("first", prompt(10), length=3)
    for _ in range(4):
        engine.step()
    assert engine.worker.held


@pytest.mark.parametrize("running", [False, True])
def test_after_a_reset_no_block_that_a_window_has_left_is_stored_for_the_one_before(make: Make, running: bool) -> None:
    """A request goes on while its first blocks are somebody else's; what it stores then is found by a third one."""
    engine = make(gpu_blocks=40, cpu_blocks=100, window=64)
    long = prompt(12)
    engine.ask("long", long, length=80)
    engine.run(until=lambda: len(engine.answers["long"]) > 30)
    # Takes all blocks that are free, and with them those that the window has left.
    engine.ask("other", prompt(11, seed=1), length=1)
    engine.run(until=lambda: "other" not in engine.scheduler.requests)
    engine.reset(running=running)
    engine.run()
    settle(engine)
    assert engine.scheduler.reset_prefix_cache()
    for blocks in (2, 5, 12):
        tokens = [*long[: blocks * BLOCK_TOKENS], 7]
        engine.ask(f"again {blocks}", tokens, length=1)
        engine.run()
        assert engine.answers[f"again {blocks}"] == answer(tokens, 1)
    assert engine.answers["long"] == answer(long, 80)


@pytest.mark.parametrize("window", [None, 64])
def test_a_hand_off_is_not_read_into_blocks_that_are_still_being_stored(make: Make, window: int | None) -> None:
    """The store of a request that has ended is as late as may be, and its blocks are given to the next one."""
    engine = make(gpu_blocks=30, cpu_blocks=100, window=window, remote=True)
    engine.delays.store = lambda: 100
    first, other = prompt(12), prompt(12, seed=1)
    engine.ask("first", first, length=1)
    engine.run(until=lambda: "first" not in engine.scheduler.requests)
    assert engine.worker.held
    for number in range(2):
        engine.ask(f"remote {number}", prompt(12, seed=1 + number), length=1)
    engine.run()
    settle(engine)
    assert engine.answers["remote 0"] == answer(other, 1)
    assert engine.scheduler.reset_prefix_cache()
    engine.ask("again", first, length=1)
    engine.run()
    assert engine.worker.loads
    assert engine.answers["again"] == answer(first, 1)


@pytest.mark.parametrize("window", [None, 64])
def test_requests_that_were_loaded_never_wait_for_each_others_blocks(make: Make, window: int | None) -> None:
    """Each needs more blocks once it is loaded. Nothing runs then that could give way: all of them must have room."""
    stems = [prompt(16, seed)[: 16 * BLOCK_TOKENS] for seed in range(4)]
    engine = make(gpu_blocks=45, cpu_blocks=200, window=window)
    for number, stem in enumerate(stems):
        fill(engine, f"stem{number}", stem)
    assert engine.scheduler.reset_prefix_cache()
    engine.delays.load = lambda: 3
    longer = {f"longer{number}": stem + prompt(6, 10 + number) for number, stem in enumerate(stems)}
    for name, tokens in longer.items():
        engine.ask(name, tokens)
    engine.run()
    assert all(engine.answers[name] == answer(tokens, 4) for name, tokens in longer.items())
    assert len(engine.worker.loads) == len(stems)

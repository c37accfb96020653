"""vLLM's scheduler over the real SSD tier on a disk that fails at random: every byte that is computed from is right.

See `mini_engine`: the model knows what the KV of each token must be and checks all that it is given.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.unit.kv_offload.faulty_io import FaultyIO
from tests.unit.kv_offload.mini_engine import PAGE, MiniEngine, answer, prompts, settle
from vllm_pd.kv_offload import ssd_tier
from vllm_pd.kv_offload.ssd_config import SsdConfig
from vllm_pd.kv_offload.ssd_tier import SegmentTier
from vllm_pd.plugin import register
from vllm_pd.tier_choices import LoadGate

pytestmark = pytest.mark.vllm

BUDGET_BLOCKS = 600
REQUESTS = 40

Make = Callable[..., MiniEngine]


@pytest.fixture
def make(tiny_model: Path, tmp_path: Path) -> Iterator[Make]:
    """Engines with the SSD tier in the test's folder; stopped in the end."""
    register()
    made: list[MiniEngine] = []

    def build(**options: Any) -> MiniEngine:
        fields = {"path": str(tmp_path), "gib": BUDGET_BLOCKS * PAGE / (1 << 30), "free_gib": 0, "identity": "tests"}
        ssd = SsdConfig.parse({**fields, **options.pop("ssd", {})})
        below = {"type": "SegmentTier", "module_path": "vllm_pd.kv_offload.ssd_tier", "ssd": ssd}
        made.append(MiniEngine(tiny_model, below=below, **options))
        return made[-1]

    yield build
    for engine in made:
        engine.stop()


def _finish(engine: MiniEngine) -> None:
    """Step until all is over, no faster than a real engine: what waits for a disk waits by the clock."""
    deadline = time.monotonic() + 60
    while engine.scheduler.has_requests():
        assert time.monotonic() < deadline, "a request never ends"
        engine.step()
        time.sleep(0.0005)


def tier_of(engine: MiniEngine) -> SegmentTier:
    [tier] = engine.connector.sub_connectors[0].connector_scheduler.manager.secondary_tiers
    return tier


def serve(engine: MiniEngine, chance: random.Random, draw: Callable[[], list[int]]) -> None:
    """Some forty prompts, several at a time, with aborts and resets, and right answers."""
    asked: dict[str, list[int]] = {}
    aborted = set()
    for number in range(REQUESTS):
        name = f"{len(engine.answers)}-{number}"
        asked[name] = draw()
        engine.ask(name, asked[name], length=chance.choice((1, 3, 12)))
        for _ in range(chance.choice((0, 1, 4, 12))):
            engine.step()
        if chance.random() < 0.1 and (alive := list(engine.scheduler.requests)):
            aborted.add(victim := chance.choice(alive))
            engine.abort(victim)
        if chance.random() < 0.1:
            engine.reset()
        elif chance.random() < 0.2:
            engine.scheduler.reset_prefix_cache()
    _finish(engine)
    for name, tokens in asked.items():
        if name not in aborted:
            assert engine.answers[name] == answer(tokens, len(engine.answers[name])), name
            assert engine.answers[name], name


@pytest.mark.parametrize(("seed", "window"), [(0, None), (1, None), (2, 64), (3, 64)])
def test_every_answer_is_exact_on_a_failing_disk_and_after_a_restart(
    make: Make, disk: FaultyIO, monkeypatch: pytest.MonkeyPatch, seed: int, window: int | None
) -> None:
    monkeypatch.setattr(ssd_tier, "_DRAIN_S", 0.5)
    chance = random.Random(seed)
    draw = prompts(chance, families=6, most_blocks=14)
    options = {
        "gpu_blocks": 40,
        "cpu_blocks": 40,
        "mode": LoadGate.ALWAYS,
        "ssd": {"load_deadline_s": 0.3},
        "window": window,
    }
    engine = make(**options)
    serve(engine, chance, draw)
    assert tier_of(engine).store.stats().read_blocks_total, "nothing came from the SSD"
    for lay in (
        lambda: disk.flip_bit("read", byte=chance.randrange(PAGE), times=5),
        lambda: disk.fail("read", times=3),
        lambda: disk.cut_short("read", times=3),
        lambda: disk.delay("read", 0.02, times=20),
        lambda: disk.hang("read", times=1),
        lambda: disk.fail("write", times=3),
        lambda: disk.flip_bit("write", byte=chance.randrange(PAGE), times=5),
    ):
        lay()
    serve(engine, chance, draw)
    disk.clear()
    serve(engine, chance, draw)
    engine.stop()

    again = make(**options)
    settle(again)
    assert tier_of(again).store.stats().recovered_blocks_total
    serve(again, chance, draw)


def test_a_new_prompt_is_computed_at_once_while_the_disk_hangs(make: Make, disk: FaultyIO) -> None:
    """Nothing waits for a disk that it does not need; what needs it waits no longer than it may."""
    chance = random.Random(7)
    engine = make(gpu_blocks=40, cpu_blocks=40, mode=LoadGate.ALWAYS, ssd={"load_deadline_s": 0.3})
    draw = prompts(chance, families=3, most_blocks=12)
    serve(engine, chance, draw)
    disk.hang("read", times=None)
    disk.hang("write", times=None)
    fresh = [chance.randrange(1000) for _ in range(200)]
    engine.ask("fresh", fresh, length=2)
    for _ in range(10):
        engine.step()
    assert engine.answers["fresh"] == answer(fresh, 2)
    serve(engine, chance, draw)
    disk.clear()

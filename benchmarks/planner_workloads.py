"""What arrives in `benchmarks.planner`: made-up hours whose mix of prompts and answers shifts, and public traces."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from vllm_pd.sim.timing import TimingModel
from vllm_pd.sim.trace import TraceRequest, read_trace
from vllm_pd.sim.work import EngineConfig

SMALL_GPU = TimingModel(
    prefill_base=0.02,
    prefill_token=1.65e-4,
    prefill_square=5e-9,
    cached_square=5e-9,
    decode_base=0.028,
    decode_kv=0.04,
    decode_kv_square=0.0,
)
"""Eight billion parameters in 8 bits on a 24-GB inference GPU: 0.3 TB/s of memory and some 100 TFLOP/s. A few requests
a second keep 16 of these busy, so an hour is some thousand requests."""
SMALL_ENGINE = EngineConfig(gpu_blocks=180, block_size=512, max_num_batched_tokens=4096)
"""What is left of 24 GB holds 92,000 tokens."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Requests of one kind; lengths are uniform within these bounds."""

    prompt: tuple[int, int]
    output: tuple[int, int]


READERS = Kind((8_000, 24_000), (50, 150))
"""Long documents, short answers."""
WRITERS = Kind((500, 1_500), (1_500, 3_500))
"""Short questions, long answers."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What arrives, at which workers, and what is promised to it. Times in seconds."""

    name: str
    ttft_s: float
    itl_s: float
    shifts: bool
    """Whether the mix of prompts and answers does, so that no fixed split is right all the time."""
    sudden: bool = False
    """Whether load comes at one moment: workers that start cold must be late, so scaling is shown only."""
    attainment: float = 0.9
    """Fraction of the requests to which it is promised, as the planner is told: about what the best split reaches."""
    seconds: float = 3600.0
    reading: Callable[[float], float] | None = None
    """Readers that arrive a second, at a time; `writing` alike. None: a trace."""
    writing: Callable[[float], float] | None = None
    trace: str = ""
    speed: float = 1.0
    timing: TimingModel = SMALL_GPU
    engine: EngineConfig = SMALL_ENGINE

    def requests(self, traces: Path, seed: int = 0) -> list[TraceRequest]:
        """The same each time for a seed; a trace is the same for all. Raises SettingsError when it cannot be read."""
        if self.reading is None or self.writing is None:
            return read_trace(traces / f"{self.trace}_trace.jsonl")
        made = [
            *_arrivals(READERS, self.reading, self.seconds, random.Random(1 + 2 * seed)),
            *_arrivals(WRITERS, self.writing, self.seconds, random.Random(2 + 2 * seed)),
        ]
        return sorted(made, key=lambda request: request.at)


def _arrivals(kind: Kind, rate: Callable[[float], float], seconds: float, chance: random.Random) -> list[TraceRequest]:
    """Independent arrivals whose rate changes: candidates at the highest rate, of which some are kept."""
    most = max(rate(float(at)) for at in range(int(seconds)))
    found: list[TraceRequest] = []
    at = 0.0
    while (at := at + chance.expovariate(most)) < seconds:
        if chance.random() * most < rate(at):
            found.append(TraceRequest(at, chance.randint(*kind.prompt), chance.randint(*kind.output), ()))
    return found


def wave(at: float, period: float) -> float:
    return math.sin(2 * math.pi * at / period)


def _sinusoid_all(at: float) -> float:
    return 0.85 * (1.0 + 0.4 * wave(at, 1500.0))


def _sinusoid_reading(at: float) -> float:
    return _sinusoid_all(at) * 0.8 * (1.0 + 0.8 * wave(at, 2400.0))


def _sinusoid_writing(at: float) -> float:
    return _sinusoid_all(at) * 1.1 * (1.0 - 0.7 * wave(at, 2400.0))


def _step_reading(at: float) -> float:
    return 1.6 if 1200 <= at < 2400 else 0.25


def _step_writing(at: float) -> float:
    return 0.4 if 1200 <= at < 2400 else 1.7


def _spike_reading(at: float) -> float:
    return 2.0 if 900 <= at < 1200 else 0.4


def _spike_writing(at: float) -> float:
    return 0.8


SINUSOID = Workload("sinusoid", 10.0, 0.06, True, reading=_sinusoid_reading, writing=_sinusoid_writing)
LONG = replace(SINUSOID, name="long sinusoid", seconds=10_800.0)
"""Long enough for its periods to be seen, of 25 minutes for how much arrives and 40 for what it is like, and used."""
STEP = Workload("step", 10.0, 0.06, True, True, reading=_step_reading, writing=_step_writing)
SPIKE = Workload("spike", 10.0, 0.06, True, True, seconds=2400.0, reading=_spike_reading, writing=_spike_writing)
CONVERSATION, SYNTHETIC = (
    Workload(
        f"{name} trace",
        3.0,
        0.015,
        False,
        attainment=0.99,
        trace=name,
        speed=2.0,
        timing=TimingModel(),
        engine=EngineConfig(),
    )
    for name in ("conversation", "synthetic")
)
WORKLOADS = (SINUSOID, STEP, SPIKE, CONVERSATION, SYNTHETIC)
ON_REQUEST = (LONG,)
"""Run only when named: what takes long."""

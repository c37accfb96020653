"""The modelled engine in real time: who leaves lets go of everything, at whatever moment."""

from __future__ import annotations

import asyncio

from vllm_pd.sim.engine import Engine
from vllm_pd.sim.live_engine import LiveEngine
from vllm_pd.sim.timing import TimingModel
from vllm_pd.sim.work import EngineConfig, Work

DEADLINE_S = 20.0


class Listener:
    def __init__(self) -> None:
        self.finished = asyncio.Event()

    def progress(self, generated: int, finished: bool) -> None:
        if finished:
            self.finished.set()

    def fetched(self) -> None:
        """Nothing is."""


async def test_a_request_that_is_dropped_in_the_step_that_finishes_it_holds_nothing() -> None:
    live = LiveEngine(Engine(EngineConfig(gpu_blocks=64), TimingModel()), 1.0, lambda _: None, lambda: None)
    listener = Listener()
    work = Work(listener, 40, 1, tuple(bytes([i]) * 32 for i in range(2)), hold=True)
    live.submit(work)
    assert live.engine.kv_usage > 0
    live.abort(work)
    async with asyncio.timeout(DEADLINE_S):
        await listener.finished.wait()
    await asyncio.sleep(0)
    assert live.engine.kv_usage == 0
    live.close()

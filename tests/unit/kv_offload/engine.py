"""A spec's configuration as vLLM would build it, and the calls its scheduler and worker make, for the tests here."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

PATIENCE_S = 30.0


def offloading_config(extra: Mapping[str, Any], *, bytes_per_block: int = 8192, **changes: Any) -> OffloadingConfig:
    fields: dict[str, Any] = {
        "groups": (OffloadingGroupConfig(tokens_per_block=32, layer_names=("layer.0",), group_id=0),),
        "worker_kv_bytes_per_block": bytes_per_block,
        "enable_kv_cache_events": False,
        "extra_config": extra,
        "engine_id": f"test_{os.getpid()}_{uuid.uuid4().hex}",
        "model": OffloadingModelConfig(name="acme/tiny", dtype="bfloat16"),
        "cache": OffloadingCacheConfig(tokens_per_hash=32, blocks_per_chunk=1),
        "parallel": OffloadingParallelConfig(
            rank=0,
            world_size=1,
            tp_size=1,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=False,
        ),
        "kv_cache_layout": "LBHNC",
    }
    return OffloadingConfig(**{**fields, **changes})


def key(number: int) -> Any:
    return make_offload_key(number.to_bytes(32, "big"), 0)


class Request:
    """One request as the scheduler sees it: a context for the manager, and steps in between.

    Args:
        show: gets the manager's metrics at the end of each step, None if there are none.
    """

    def __init__(self, manager: Any, name: str, show: Callable[[Any], None] = lambda _: None) -> None:
        self.manager, self._show = manager, show
        self.context = ReqContext(req_id=name)
        manager.on_new_request(self.context)

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext(new_req_ids=(), preempted_req_ids=()))
        self._show(self.manager.get_stats())

    def settle(self, each: Callable[[], None] | None = None) -> None:
        """Step until the manager has nothing left to do; `each` is called after every step, or events are taken."""
        deadline = time.monotonic() + PATIENCE_S
        while self.manager.has_pending_work():
            assert time.monotonic() < deadline, "the manager still has pending work"
            self.step()
            if each is None:
                list(self.manager.take_events())
            else:
                each()
            time.sleep(0.001)

    def lookup(self, number: int) -> LookupResult:
        """Ask for a chunk, step by step, until the answer is final; fails if it never is."""
        deadline = time.monotonic() + PATIENCE_S
        self.context.set_offload_key_position(key(number), (number + 1) * 32)
        while True:
            result = self.manager.lookup(key(number), self.context)
            if result in (LookupResult.HIT, LookupResult.MISS):
                return result
            assert time.monotonic() < deadline, f"the lookup of {number} never ends"
            self.step()
            time.sleep(0.001)

    def store(self, worker: Any, job: int, numbers: Sequence[int], block_spec: Any) -> bool:
        """Store chunks from the KV cache; returns False when the manager has no room."""
        for number in numbers:
            self.context.set_offload_key_position(key(number), (number + 1) * 32)
        output = self.manager.prepare_store([key(n) for n in numbers], self.context)
        if output is None:
            return False
        assert output.keys_to_store == [key(n) for n in numbers]
        worker.submit_store(job, block_spec, output.store_spec)
        worker.wait({job})
        assert [r.job_id for r in worker.get_finished() if r.success] == [job]
        self.manager.complete_store(output.keys_to_store, self.context)
        return True

    def load(self, worker: Any, job: int, numbers: Sequence[int], block_spec: Any) -> None:
        keys = [key(n) for n in numbers]
        worker.submit_load(job, self.manager.prepare_load(keys, self.context), block_spec)
        worker.wait({job})
        assert [r.job_id for r in worker.get_finished() if r.success] == [job]
        self.manager.complete_load(keys, self.context)

    def finish(self) -> None:
        self.manager.on_request_finished(self.context)

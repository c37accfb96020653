"""LMCache's connector as we use it with a real `lmcache server`; the engine around it is played by the test.

Each scheduler step is played in vLLM's order: lookups, allocation, metadata, then load, "compute", store in the worker.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("lmcache")

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from benchmarks.lmcache_server import LMCacheServer
from vllm_pd import transfer_config as tc
from vllm_pd.connectors.lmcache_connector import PDLMCacheConnector
from vllm_pd.settings import WorkerSettings
from vllm_pd.vllm_compat import KVConnectorRole, KVTransferConfig

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

BLOCK, HEADS, HEAD = 32, 2, 64
CHUNK = 2 * BLOCK
LAYERS = ("layer.0", "layer.1")
PROMPT = 4 * BLOCK
PATIENCE_S = 60.0


@dataclass(slots=True)
class Engine:
    """One engine's two halves of the connector, and its KV cache."""

    scheduler: PDLMCacheConnector
    worker: PDLMCacheConnector
    cache: dict[str, torch.Tensor]
    _names: int = field(default=0)

    def serve(self, tokens: list[int], blocks: list[int], *, fill: float, **request: Any) -> int:
        """Serve a prompt in these blocks: load what LMCache has, write `fill` where nothing was loaded, store.

        Returns:
            Tokens whose KV was loaded.
        """
        self._names += 1
        name = f"r{self._names}"
        mine = Request(name, tokens, SamplingParams(max_tokens=1), None, **request)
        found = self._matched(mine)
        held = SimpleNamespace(get_block_ids=lambda: (blocks,))
        self.scheduler.update_state_after_alloc(mine, held, found)
        good = self._load(name, found)
        for layer in self.cache.values():
            layer[blocks[good // BLOCK :]] = fill
        self._step(new=name, tokens=len(tokens) - good)
        self.worker.wait_for_save()
        self.scheduler.request_finished(mine, blocks)
        self.worker.get_transfer_results({name})
        return good

    def _matched(self, mine: Request) -> int:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            found, _ = self.scheduler.get_num_new_matched_tokens(mine, 0)
            if found is not None:
                return found
            assert time.monotonic() < deadline, "the lookup was never answered"
            time.sleep(0.01)

    def _load(self, name: str, found: int) -> int:
        """Tokens that are there when the load is over."""
        if not found:
            return 0
        self._step()
        self.worker.start_load_kv(SimpleNamespace())
        deadline = time.monotonic() + PATIENCE_S
        while name not in self.worker.get_transfer_results(set()).finished_recving:
            assert time.monotonic() < deadline, "the load never ended"
            time.sleep(0.01)
        return 0 if self.worker.get_block_ids_with_load_errors() else found

    def _step(self, new: str = "", tokens: int = 0) -> None:
        output = SimpleNamespace(
            scheduled_new_reqs=[SimpleNamespace(req_id=new)] if new else [],
            scheduled_cached_reqs=SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set()),
            num_scheduled_tokens={new: tokens} if new else {},
            preempted_req_ids=None,
        )
        self.worker.bind_connector_metadata(self.scheduler.build_connector_meta(output))

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()


def engine(model: Path, server: LMCacheServer) -> Engine:
    settings = WorkerSettings(offload="lmcache", lmcache_url=server.url, lmcache={"heartbeat_interval": 0.5})
    (child,) = tc.child_configs(settings, nixl=False)
    args = EngineArgs(model=str(model), block_size=BLOCK, kv_transfer_config=KVTransferConfig(**child))
    config = args.create_engine_config()
    # As vLLM lays it out on the CPU platform.
    config.cache_config.kv_cache_layout = "LBHNC"
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=HEAD, dtype=torch.float32)
    groups = KVCacheConfig(num_blocks=32, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(list(LAYERS), spec)])
    cache = {name: torch.zeros(32, HEADS, BLOCK, 2 * HEAD) for name in LAYERS}
    scheduler = PDLMCacheConnector(config, KVConnectorRole.SCHEDULER, groups)
    worker = PDLMCacheConnector(config, KVConnectorRole.WORKER, groups)
    worker.register_kv_caches(cache)
    return Engine(scheduler, worker, cache)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LMCacheServer]:
    with LMCacheServer(tmp_path_factory.mktemp("lmcache"), gib=0.03, chunk=CHUNK) as made:
        yield made
    assert made.shared_memory == []


@pytest.fixture
def running(tiny_model: Path, server: LMCacheServer) -> Iterator[Engine]:
    made = engine(tiny_model, server)
    yield made
    made.close()


def tokens(start: int) -> list[int]:
    return list(range(start, start + PROMPT))


def test_blocks_come_back_as_they_were_into_other_blocks(running: Engine) -> None:
    assert running.serve(tokens(0), [1, 2, 3, 4], fill=0.25) == 0
    stored = {name: layer[[1, 2, 3, 4]].clone() for name, layer in running.cache.items()}
    # Of a prompt that is there as a whole, vLLM computes the last token again, and here its block.
    assert running.serve(tokens(0), [11, 12, 13, 14], fill=0.75) == PROMPT - 1
    for name, layer in running.cache.items():
        assert torch.equal(layer[[11, 12, 13]], stored[name][:3])


def test_engines_and_tenants_that_differ_find_nothing_of_each_other(
    running: Engine, tiny_model: Path, server: LMCacheServer
) -> None:
    assert running.serve(tokens(200), [1, 2, 3, 4], fill=1.0, cache_salt="a/b") == 0
    assert running.serve(tokens(200), [5, 6, 7, 8], fill=2.0) == 0
    assert running.serve(tokens(200), [5, 6, 7, 8], fill=2.0, cache_salt="other") == 0
    assert running.serve(tokens(200), [9, 10, 11, 12], fill=3.0, cache_salt="a/b") > 0
    assert float(running.cache["layer.0"][9].max()) == 1.0
    another = engine(tiny_model, server)
    try:
        assert another.serve(tokens(200), [1, 2, 3, 4], fill=4.0, cache_salt="a/b") > 0, "the same engine elsewhere"
        another.scheduler.weights_changed("reload_weights")
        assert another.serve(tokens(200), [1, 2, 3, 4], fill=5.0, cache_salt="a/b") == 0
    finally:
        another.close()


def test_a_server_that_is_killed_costs_misses_only_and_is_used_again_when_it_is_back(
    running: Engine, server: LMCacheServer
) -> None:
    running.serve(tokens(400), [1, 2, 3, 4], fill=1.0)
    assert running.serve(tokens(400), [5, 6, 7, 8], fill=2.0) > 0
    server.process.kill()
    for number in range(4):
        assert running.serve(tokens(500 + 200 * number), [1, 2, 3, 4], fill=1.0) == 0
    assert running.serve(tokens(400), [5, 6, 7, 8], fill=2.0) == 0, "what the dead server had is computed"
    server.restart()
    deadline = time.monotonic() + PATIENCE_S
    while not running.serve(tokens(400), [9, 10, 11, 12], fill=7.0):
        assert time.monotonic() < deadline, "the server that came back is not used"
        time.sleep(0.2)
    assert float(running.cache["layer.1"][9].min()) == float(running.cache["layer.1"][9].max()) == 7.0

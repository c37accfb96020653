"""LMCache's connector as we use it: keys, requests that stay out, loads and servers that fail. Without its server."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("lmcache")

import torch
from lmcache.integration.vllm import lmcache_mp_connector as theirs
from lmcache.integration.vllm.lmcache_mp_metadata import LMCacheMPRequestTracker
from lmcache.integration.vllm.vllm_multi_process_adapter import LMCacheMPWorkerAdapter
from lmcache.v1.multiprocess.transfer_context.pickle import EngineDrivenContextPickle
from vllm.config import KVEventsConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus

from vllm_pd import transfer_config as tc
from vllm_pd.connectors import lmcache_connector
from vllm_pd.connectors.lmcache_connector import PDLMCacheConnector
from vllm_pd.connectors.pd_connector import expand
from vllm_pd.errors import SettingsError, UnsupportedLMCacheError
from vllm_pd.settings import WorkerSettings
from vllm_pd.vllm_compat import KVConnectorRole, KVTransferConfig

pytestmark = pytest.mark.vllm

BLOCK = 32
CHUNK = 64


class FakeSchedulerAdapter:
    """The scheduler's side of the link to the server, which answers at once."""

    lmcache_tokens_per_chunk = CHUNK

    def __init__(self, **given: Any) -> None:
        self.given = given
        self.hits: dict[str, int] = {}
        self.lookups: list[dict[str, Any]] = []

    def maybe_submit_lookup_request(self, request_id: str, **asked: Any) -> None:
        self.lookups.append({"request_id": request_id, **asked})

    def check_lookup_result(self, request_id: str) -> int:
        return self.hits.get(request_id, 0)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


class FakeWorkerAdapter:
    """The worker's side; `fails` is raised by every transfer."""

    def __init__(self, **given: Any) -> None:
        self.given = given
        self.fails: Exception | None = None
        self.loads: list[str] = []
        self.stores: list[str] = []
        self.error_block_ids: set[int] = set()
        self._failed_request_ids: set[str] = set()
        self._dropped_retrieves: set[str] = set()
        self._health_event = threading.Event()
        self._health_event.set()
        self.transfer_ctx = SimpleNamespace(_engine_driven_context=None)

    @property
    def is_healthy(self) -> bool:
        return self._health_event.is_set()

    def create_recorded_event(self) -> None:
        return None

    def submit_retrieve_request(self, request_id: str, op: Any, event: Any, **rest: Any) -> None:
        if self.fails is not None:
            raise self.fails
        self.loads.append(request_id)

    def batched_submit_store_requests(self, request_ids: list[str], ops: Any, event: Any, **rest: Any) -> None:
        if self.fails is not None:
            raise self.fails
        self.stores += request_ids


def group(*layers: str, heads: int = 2) -> KVCacheGroupSpec:
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=heads, head_size=64, dtype=torch.bfloat16)
    return KVCacheGroupSpec(list(layers), spec)


def cache(*groups: KVCacheGroupSpec) -> KVCacheConfig:
    return KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=list(groups) or [group("layer.0")])


@pytest.fixture(scope="module")
def vllm_config(tiny_model: Path) -> Any:
    (child,) = tc.child_configs(WorkerSettings(offload="lmcache"), nixl=False)
    args = EngineArgs(model=str(tiny_model), block_size=BLOCK, kv_transfer_config=KVTransferConfig(**child))
    made = args.create_engine_config()
    made.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq")
    return made


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theirs, "LMCacheMPSchedulerAdapter", FakeSchedulerAdapter)
    monkeypatch.setattr(theirs, "LMCacheMPWorkerAdapter", FakeWorkerAdapter)


@pytest.fixture
def scheduler(vllm_config: Any) -> PDLMCacheConnector:
    return PDLMCacheConnector(vllm_config, KVConnectorRole.SCHEDULER, cache())


@pytest.fixture
def worker(vllm_config: Any) -> PDLMCacheConnector:
    return PDLMCacheConnector(vllm_config, KVConnectorRole.WORKER, cache())


def request(name: str, *, tokens: int = 4 * BLOCK, params: dict[str, Any] | None = None, **more: Any) -> Request:
    sampling = SamplingParams(max_tokens=4, extra_args={"kv_transfer_params": params} if params else None)
    return Request(
        request_id=name, prompt_token_ids=list(range(tokens)), sampling_params=sampling, pooling_params=None, **more
    )


def blocks(*ids: int) -> Any:
    return SimpleNamespace(get_block_ids=lambda: (list(ids),))


def step(**tokens: int) -> Any:
    """What the scheduler says of a step in which these requests are new."""
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in tokens],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set()),
        num_scheduled_tokens=tokens,
        preempted_req_ids=None,
    )


def stores(scheduler: PDLMCacheConnector, output: Any) -> list[tuple[str, list[int]]]:
    meta = scheduler.build_connector_meta(output)
    return [(m.request_id, m.op.block_ids[0]) for m in meta.requests if m.direction == "STORE"]


def test_it_is_a_child_of_pd_in_place_of_the_tiers() -> None:
    config = tc.build(WorkerSettings(offload="lmcache"))
    names = [child["kv_connector"] for child in expand(config).kv_connector_extra_config["connectors"]]
    assert names == ["NixlConnector", "PDLMCacheConnector"]


def test_the_salt_carries_the_engine_and_the_requests_own(vllm_config: Any, scheduler: PDLMCacheConnector) -> None:
    for name, salt in (("a", None), ("b", "tenant/1"), ("c", "tenant/2")):
        scheduler.get_num_new_matched_tokens(request(name, cache_salt=salt), 0)
    salts = [lookup["cache_salt"] for lookup in scheduler.scheduler_adapter.lookups]
    assert len(set(salts)) == 3 and all(len(salt) == 64 for salt in salts)
    other = PDLMCacheConnector(vllm_config, KVConnectorRole.SCHEDULER, cache(group("layer.0", heads=4)))
    other.get_num_new_matched_tokens(request("a"), 0)
    assert other.scheduler_adapter.lookups[0]["cache_salt"] not in salts


def test_a_client_cannot_speak_to_lmcache(scheduler: PDLMCacheConnector) -> None:
    asked = {"lmcache.max_offload_tokens": "many", "lmcache.tag": "x", "cached_token_stats": True}
    mine = request("a", params=asked)
    mine.kv_transfer_params = asked
    assert scheduler.request_finished(mine, []) == (True, None), "one that LMCache has not met"
    scheduler.get_num_new_matched_tokens(mine, 0)
    assert scheduler.scheduler_adapter.lookups[0]["request_configs"] is None
    scheduler.update_state_after_alloc(mine, blocks(1, 2, 3, 4), 0)
    assert stores(scheduler, step(a=4 * BLOCK)) == [("a", [1, 2, 3, 4])]
    assert scheduler.request_finished(mine, [1]) == (True, None)


def test_an_adapters_blocks_are_neither_looked_for_nor_stored(
    scheduler: PDLMCacheConnector, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", logger="vllm.vllm_pd"):
        for name in ("a", "b"):
            mine = request(name, lora_request=LoRARequest("tuned", 1, "/tuned"))
            scheduler.scheduler_adapter.hits[name] = 2 * CHUNK
            scheduler.on_new_request(mine)
            assert scheduler.get_num_new_matched_tokens(mine, 0) == (0, False)
            scheduler.update_state_after_alloc(mine, blocks(1, 2, 3, 4), 0)
            assert stores(scheduler, step(**{name: 4 * BLOCK})) == []
            assert scheduler.request_finished(mine, [1, 2, 3, 4])[0]
    assert scheduler.scheduler_adapter.lookups == []
    assert len(caplog.records) == 1 and "LoRA" in caplog.text


def test_after_a_hand_off_that_failed_the_prompt_is_computed_and_its_new_blocks_are_stored(
    scheduler: PDLMCacheConnector,
) -> None:
    mine = request("a")
    assert scheduler.get_num_new_matched_tokens(mine, 0) == (0, False)
    # NIXL has the blocks, and they do not come; meanwhile the prefill worker's are in LMCache.
    scheduler.update_state_after_alloc(mine, blocks(1, 2, 3, 4), 0)
    scheduler.scheduler_adapter.hits["a"] = 2 * CHUNK
    for _ in range(2):
        assert scheduler.get_num_new_matched_tokens(mine, 0) == (0, False)
    scheduler.update_state_after_alloc(mine, blocks(7, 8, 9, 10), 0)
    assert stores(scheduler, step(a=4 * BLOCK)) == [("a", [7, 8, 9, 10])]


def test_a_preempted_request_may_load_again(scheduler: PDLMCacheConnector) -> None:
    mine = request("a")
    scheduler.get_num_new_matched_tokens(mine, 0)
    scheduler.update_state_after_alloc(mine, blocks(1, 2, 3, 4), 0)
    scheduler.build_connector_meta(step(a=4 * BLOCK))
    mine.status = RequestStatus.PREEMPTED
    scheduler.scheduler_adapter.hits["a"] = CHUNK
    assert scheduler.get_num_new_matched_tokens(mine, 0) == (CHUNK, True)
    assert len(scheduler.scheduler_adapter.lookups[-1]["cache_salt"]) == 64


def test_after_a_change_of_weights_nothing_from_before_is_found_or_stored(scheduler: PDLMCacheConnector) -> None:
    running, waiting = request("running"), request("waiting")
    scheduler.scheduler_adapter.hits["waiting"] = CHUNK
    for mine in (running, waiting):
        scheduler.get_num_new_matched_tokens(mine, 0)
    scheduler.update_state_after_alloc(running, blocks(1, 2, 3, 4), 0)
    scheduler.weights_changed("reload_weights")
    assert stores(scheduler, step(running=4 * BLOCK)) == []
    assert scheduler.get_num_new_matched_tokens(waiting, 0) == (0, False)
    scheduler.get_num_new_matched_tokens(request("later"), 0)
    first, *_, last = (lookup["cache_salt"] for lookup in scheduler.scheduler_adapter.lookups)
    assert first != last


def test_no_kv_events_are_gathered_that_nobody_would_fetch(worker: PDLMCacheConnector) -> None:
    assert worker.worker_adapter.given["enable_kv_events"] is False


def transfers(worker: PDLMCacheConnector, *directions: str) -> None:
    op = SimpleNamespace(flat_block_ids=[3, 4])
    meta = theirs.LMCacheMPConnectorMetadata()
    for place, direction in enumerate(directions):
        more = {"cache_salt": "", "request_configs": None}
        meta.requests.append(SimpleNamespace(request_id=f"r{place}", direction=direction, op=op, **more))
    worker.bind_connector_metadata(meta)


def test_a_store_that_runs_into_a_timeout_does_not_end_the_engine(worker: PDLMCacheConnector) -> None:
    transfers(worker, "STORE")
    worker.worker_adapter.fails = TimeoutError("PREPARE_STORE timed out")
    worker.wait_for_save()
    assert not worker.worker_adapter.is_healthy, "until a heartbeat comes back nothing is asked of the server"


def test_a_load_that_fails_is_reported_for_every_request_of_the_step(worker: PDLMCacheConnector) -> None:
    transfers(worker, "RETRIEVE", "STORE", "RETRIEVE")
    worker.worker_adapter.fails = RuntimeError("broken")
    worker.start_load_kv(SimpleNamespace())
    adapter = worker.worker_adapter
    assert adapter._dropped_retrieves == adapter._failed_request_ids == {"r0", "r2"}
    assert adapter.error_block_ids == {3, 4}


def test_a_server_that_works_is_asked(worker: PDLMCacheConnector) -> None:
    transfers(worker, "RETRIEVE", "STORE")
    worker.start_load_kv(SimpleNamespace())
    worker.wait_for_save()
    assert (worker.worker_adapter.loads, worker.worker_adapter.stores) == (["r0"], ["r1"])


def test_pickle_over_a_socket_is_refused_at_the_start_and_later(
    worker: PDLMCacheConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(theirs.LMCacheMPConnector, "register_kv_caches", lambda self, kv_caches: None)
    worker.register_kv_caches({})
    worker.worker_adapter.transfer_ctx._engine_driven_context = object.__new__(EngineDrivenContextPickle)
    with pytest.raises(SettingsError, match=r"pickle.*--shm-name"):
        worker.register_kv_caches({})
    transfers(worker, "RETRIEVE", "STORE")
    worker.start_load_kv(SimpleNamespace())
    worker.wait_for_save()
    assert worker.worker_adapter.loads == worker.worker_adapter.stores == []
    assert worker.worker_adapter._dropped_retrieves == {"r0"}


def test_a_server_that_does_not_answer_is_named_with_the_way_to_start_it(
    worker: PDLMCacheConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Any, kv_caches: Any) -> None:
        raise ConnectionError("no answer")

    monkeypatch.setattr(theirs.LMCacheMPConnector, "register_kv_caches", refuse)
    with pytest.raises(SettingsError, match=r"tcp://localhost:5555 .*5 s; .*--supported-transfer-mode auto"):
        worker.register_kv_caches({})


def test_a_model_with_several_kinds_of_kv_is_refused(vllm_config: Any) -> None:
    with pytest.raises(SettingsError, match="--pd-offload tiers"):
        PDLMCacheConnector(vllm_config, KVConnectorRole.SCHEDULER, cache(group("layer.0"), group("layer.1", heads=4)))


def test_an_lmcache_that_is_built_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    lmcache_connector.check_internals()
    fields = {
        name: field for name, field in LMCacheMPRequestTracker.__dataclass_fields__.items() if name != "cache_salt"
    }
    monkeypatch.setattr(LMCacheMPRequestTracker, "__dataclass_fields__", fields)
    with pytest.raises(UnsupportedLMCacheError, match=r"cache_salt.*lmcache==0\.5\.6"):
        lmcache_connector.check_internals()


def test_what_is_used_of_the_workers_adapter_is_there() -> None:
    made = LMCacheMPWorkerAdapter.__init__.__code__
    assert {*lmcache_connector._ADAPTER} <= {*made.co_names}

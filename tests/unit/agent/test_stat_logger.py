"""The stat logger with vLLM's own classes, a real store and a real HTTP socket; only the engine is absent."""

from __future__ import annotations

import dataclasses
import gc
import http.server
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.agent.test_agent import eventually, workers

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

from vllm_pd import vllm_compat as compat  # noqa: E402
from vllm_pd.agent import runtime, stat_logger  # noqa: E402
from vllm_pd.agent.kv_event_source import EventEndpoints  # noqa: E402
from vllm_pd.agent.readiness import OwnServer  # noqa: E402
from vllm_pd.agent.runtime import RuntimeConfig  # noqa: E402
from vllm_pd.agent.tokenizer_files import Rendering  # noqa: E402
from vllm_pd.graph.embedded_store import EmbeddedStore  # noqa: E402
from vllm_pd.state import Role  # noqa: E402
from vllm_pd.vllm_compat.version import vllm_version  # noqa: E402


class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        """Be silent."""


@pytest.fixture(autouse=True)
def process_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo what configuring an agent leaves in a process."""
    monkeypatch.setattr(runtime, "_config", None)
    monkeypatch.setattr(compat.AsyncLLM, "shutdown", compat.AsyncLLM.shutdown)
    monkeypatch.setattr(stat_logger.atexit, "register", lambda function: function)


@pytest.fixture
def store() -> Iterator[EmbeddedStore]:
    with EmbeddedStore() as store:
        yield store


@pytest.fixture
def port() -> Iterator[int]:
    """A server that answers /health."""
    with http.server.HTTPServer(("127.0.0.1", 0), Health) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def engine_config(model: str, rank: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=model,
            revision=None,
            tokenizer=model,
            tokenizer_revision=None,
            tokenizer_mode="auto",
            runner_type="generate",
            trust_remote_code=False,
            code_revision=None,
            skip_tokenizer_init=False,
            enable_prompt_embeds=False,
            hf_config=SimpleNamespace(model_type="llama"),
            dtype="torch.bfloat16",
            max_model_len=2048,
            generation_config="auto",
            override_generation_config={"max_new_tokens": 300},
            get_diff_sampling_param=lambda: {"max_tokens": 300, "presence_penalty": 0.5},
        ),
        cache_config=SimpleNamespace(
            cache_dtype="auto", block_size=32, prefix_caching_hash_algo="sha256_cbor", num_gpu_blocks=256
        ),
        device_config=SimpleNamespace(device_type="cpu"),
        parallel_config=SimpleNamespace(
            _api_process_rank=rank,
            _api_process_count=1,
            decode_context_parallel_size=1,
            data_parallel_rank=0,
            data_parallel_size_local=2,
        ),
        scheduler_config=SimpleNamespace(policy="priority", max_num_batched_tokens=512),
        kv_events_config=None,
        kv_transfer_config=SimpleNamespace(engine_id="engine-1"),
        shutdown_timeout=30,
    )


def config(store: EmbeddedStore, port: int, **changes: Any) -> RuntimeConfig:
    settings: dict[str, Any] = {
        "store": store.url,
        "namespace": "test",
        "role": Role.DECODE,
        "host": "127.0.0.1",
        "port": port,
        "nixl_host": "127.0.0.1",
        "nixl_port": 5600,
        "models": ("tiny",),
        "loras": ("adapter",),
        "lora_paths": ("/adapters/1",),
    }
    return RuntimeConfig(**(settings | changes))


def test_the_worker_appears_with_the_engine_and_goes_before_the_engine_client(
    store: EmbeddedStore, port: int, tiny_model: Any
) -> None:
    runtime.configure(config(store, port, rendering=Rendering(chat_template="{{ literal }}")))
    logger = stat_logger.PDStatLogger(engine_config(str(tiny_model)), [0, 1])
    assert workers(store) == ()
    logger.log_engine_initialized()
    logger.log_engine_initialized()
    eventually(lambda: bool(workers(store)))
    record = workers(store)[0].record
    assert (record.id, record.url) == (f"127.0.0.1:{port}", f"http://127.0.0.1:{port}")
    assert (record.role, record.models) == (Role.DECODE, ("tiny", "adapter"))
    assert (record.loras, record.lora_paths) == (("adapter",), ("/adapters/1",))
    assert (record.engine_id, record.nixl_host, record.nixl_port) == ("engine-1", "127.0.0.1", 5600)
    assert (record.dp_size, record.kv_blocks, record.max_model_len) == (2, 256, 2048)
    assert record.pool.model == str(tiny_model)
    assert record.versions["vllm"] == vllm_version()

    stats = compat.SchedulerStats(
        num_running_reqs=3, num_waiting_reqs=2, num_skipped_waiting_reqs=1, kv_cache_usage=0.5
    )
    logger.record(stats, None, engine_idx=1)
    logger.record(None, None, engine_idx=0)
    eventually(lambda: any((w.running, w.waiting, w.kv_usage) == (3, 3, 0.5) for w in workers(store)))
    assert set(workers(store)[0].loads) == {1}

    engine_client = object.__new__(compat.AsyncLLM)
    engine_client.shutdown(timeout=1.0)
    assert workers(store) == ()
    engine_client.shutdown()


def test_the_template_of_the_flag_is_published(store: EmbeddedStore, port: int, tiny_model: Any) -> None:
    engine = engine_config(str(tiny_model))
    spec = stat_logger.agent_spec(config(store, port, rendering=Rendering(chat_template="{{ literal }}")), engine, 1)
    files = spec.load_tokenizer()
    assert files is not None
    assert files.chat_template == "{{ literal }}"
    engine.model_config.skip_tokenizer_init = True
    assert stat_logger.agent_spec(config(store, port), engine, 1).load_tokenizer() is None


@pytest.mark.parametrize(("rank", "registrar", "writer"), [(-1, True, 0), (0, True, 0), (3, False, 3)])
def test_one_of_several_api_servers_registers(
    store: EmbeddedStore, port: int, rank: int, registrar: bool, writer: int
) -> None:
    spec = stat_logger.agent_spec(config(store, port), engine_config("m", rank), 1)
    assert (spec.is_registrar, spec.writer) == (registrar, writer)
    assert spec.age_s() > 0


def test_without_a_store_no_thread_is_started() -> None:
    before = threading.active_count()
    logger = stat_logger.PDStatLogger(engine_config("m"), [0])
    logger.log_engine_initialized()
    logger.record(compat.SchedulerStats(), None)
    assert threading.active_count() == before


class EngineClient:
    """What vLLM's engine client knows of its engines' KV events."""

    def __init__(self, *published: Any) -> None:
        self.published = dict(enumerate(published))

    def get_kv_event_sources(self) -> dict[int, Any]:
        return self.published


def test_the_agent_reads_where_each_engine_really_publishes(
    store: EmbeddedStore, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "_engine", None)
    asked = compat.KVEventsConfig(enable_kv_cache_events=True, endpoint="tcp://*:5557", topic="t")
    engine = engine_config("m")
    engine.kv_events_config = asked
    spec = stat_logger.agent_spec(config(store, port, kv_events=True), engine, 2)
    assert spec.event_sources() == {}
    client = EngineClient(asked, dataclasses.replace(asked, endpoint="tcp://*:5558", replay_endpoint="tcp://*:6558"))
    runtime.remember_engine(client)
    assert spec.event_sources() == {
        0: EventEndpoints("tcp://127.0.0.1:5557", "", "t"),
        1: EventEndpoints("tcp://127.0.0.1:5558", "tcp://127.0.0.1:6558", "t"),
    }
    # An engine that connects to a collector has nothing to connect to.
    engine.kv_events_config = dataclasses.replace(asked, endpoint="tcp://collector:5557")
    assert spec.event_sources() == {}
    engine.kv_events_config = asked
    assert stat_logger.agent_spec(config(store, port), engine, 2).event_sources() == {}
    del client
    gc.collect()
    assert spec.event_sources() == {}


def test_adapters_and_the_hash_seed_are_part_of_the_record(
    store: EmbeddedStore, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "17")
    record = stat_logger.agent_spec(config(store, port), engine_config("m"), 1).record
    assert (record.loras, record.lora_paths) == (("adapter",), ("/adapters/1",))
    assert record.models == ("tiny", "adapter")
    assert record.pool.hash_seed == "17"
    monkeypatch.delenv("PYTHONHASHSEED")
    assert stat_logger.agent_spec(config(store, port), engine_config("m"), 1).record.pool.hash_seed == ""


def test_engines_are_numbered_as_requests_name_them(
    store: EmbeddedStore, port: int, tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a load balancer of its own a server has, for example, ranks 4 and 5, which its clients call 0 and 1."""
    monkeypatch.setattr(runtime, "_engine", None)
    published = compat.KVEventsConfig(enable_kv_cache_events=True, endpoint="tcp://*:5561", topic="t")
    engine = engine_config(str(tiny_model))
    engine.kv_events_config = published
    engine.parallel_config.data_parallel_rank = 4
    client = EngineClient()
    client.published = {4: published, 5: dataclasses.replace(published, endpoint="tcp://*:5562")}
    runtime.remember_engine(client)
    spec = stat_logger.agent_spec(config(store, port, kv_events=True), engine, 2)
    assert spec.record.first_rank == 4
    assert spec.event_sources() == {
        0: EventEndpoints("tcp://127.0.0.1:5561", "", "t"),
        1: EventEndpoints("tcp://127.0.0.1:5562", "", "t"),
    }

    runtime.configure(config(store, port))
    logger = stat_logger.PDStatLogger(engine, [4, 5])
    logger.log_engine_initialized()
    eventually(lambda: bool(workers(store)))
    logger.record(compat.SchedulerStats(num_running_reqs=3), None, engine_idx=5)
    eventually(lambda: set(workers(store)[0].loads) == {1})
    object.__new__(compat.AsyncLLM).shutdown()


def test_a_worker_that_prefills_takes_jobs_with_its_own_key(store: EmbeddedStore, port: int) -> None:
    engine = engine_config("m")
    spec = stat_logger.agent_spec(config(store, port, role=Role.PREFILL, api_key="hunter2"), engine, 2)
    assert spec.prefill is not None
    assert (spec.record.claims, spec.record.asks_key) == (True, True)
    assert (spec.prefill.api_key, spec.prefill.budget_tokens, spec.prefill.grace_s) == ("hunter2", 2 * 512 * 2, 30)
    assert spec.prefill.server == OwnServer(host="127.0.0.1", port=port)
    assert spec.prefill.progress_known
    # One that only decodes now may be asked to prefill later.
    assert stat_logger.agent_spec(config(store, port, role=Role.DECODE), engine, 2).record.claims
    assert "hunter2" not in repr(spec)
    # The reports of the engines then reach this process in part.
    engine.parallel_config._api_process_count = 2
    spec = stat_logger.agent_spec(config(store, port, role=Role.BOTH, prefill_budget_tokens=99), engine, 2)
    assert spec.prefill is not None
    assert (spec.prefill.budget_tokens, spec.prefill.progress_known, spec.record.asks_key) == (99, False, False)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"role": Role.PREFILL, "nixl_host": ""}, ""),
        ({"role": Role.PREFILL, "tls": True, "asks_certificate": True}, "wants certificates of its clients"),
        (
            {"role": Role.PREFILL, "tls": True, "uds": "/s", "advertise_url": "https://a:1"},
            "TLS on a Unix socket",
        ),
    ],
)
def test_a_worker_that_cannot_do_jobs_claims_none_and_says_why(
    changes: dict[str, Any], said: str, store: EmbeddedStore, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", logger="vllm.vllm_pd"):
        caplog.handler.setLevel("WARNING")
        stat_logger.logger.addHandler(caplog.handler)
        try:
            spec = stat_logger.agent_spec(config(store, port, **changes), engine_config("m"), 1)
        finally:
            stat_logger.logger.removeHandler(caplog.handler)
    assert (spec.prefill, spec.record.claims) == (None, False)
    assert said in caplog.text and bool(caplog.text) == bool(said)

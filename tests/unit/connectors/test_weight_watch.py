"""Calls to the workers that may change weights are told to the tiers, and routers that the SSD's blocks are gone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm_pd import vllm_compat as compat
from vllm_pd.connectors import weight_watch
from vllm_pd.connectors.ssd_link import SsdLink

pytestmark = pytest.mark.vllm


class Connector:
    def __init__(self, said: list[str]) -> None:
        self._said = said

    def weights_changed(self, why: str) -> bool:
        self._said.append(f"changed by {why}")
        return True

    def caches_were_reset(self) -> None:
        self._said.append("caches were reset")

    def take_events(self) -> tuple[()]:
        return ()


def reset_prefix_cache(self: Any, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
    """The scheduler's: fails while a request holds blocks, whether it resets the connector or not."""
    return bool(self.works)


class Scheduler:
    def __init__(self, connector: Connector | None) -> None:
        self.connector = connector
        self.works = True


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def engine(said: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    class Engine:
        def __init__(self) -> None:
            self.scheduler = SimpleNamespace(
                connector=Connector(said),
                kv_cache_manager=SimpleNamespace(take_events=lambda: None),
                kv_event_publisher=SimpleNamespace(publish=lambda batch: said.append(_words(batch.events))),
            )

        def collective_rpc(self, method: Any, timeout: float | None = None, *args: Any) -> str:
            said.append(f"called {method if isinstance(method, str) else method.__name__}")
            return "answer"

    monkeypatch.setattr(compat, "EngineCore", Engine)
    monkeypatch.setattr(compat, "Scheduler", type("Other", (Scheduler,), {"reset_prefix_cache": reset_prefix_cache}))
    weight_watch.install()
    weight_watch.install()
    return Engine()


def _words(events: list[Any]) -> str:
    return ", ".join(f"removed {event.block_hashes} of {event.medium}" for event in events)


@pytest.mark.parametrize("method", ["reload_weights", "update_weights", "anything_of_a_framework"])
def test_a_call_that_may_change_weights_is_told_before_it_is_made(engine: Any, said: list[str], method: str) -> None:
    assert engine.collective_rpc(method, 1.0) == "answer"
    assert said == [f"changed by {method}", "removed [] of STORAGE", f"called {method}"]


def test_only_a_reset_of_all_caches_that_succeeds_is_told(engine: Any, said: list[str]) -> None:
    scheduler: Any = compat.Scheduler(Connector(said))
    assert scheduler.reset_prefix_cache()
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    scheduler.works = False
    assert not scheduler.reset_prefix_cache(reset_connector=True)
    assert said == []
    scheduler.works = True
    assert scheduler.reset_prefix_cache(False, True)
    assert said == ["caches were reset"]
    assert compat.Scheduler(None).reset_prefix_cache(reset_connector=True)


def test_a_function_that_the_workers_run_counts(engine: Any, said: list[str]) -> None:
    def patch_the_model() -> None: ...

    engine.collective_rpc(patch_the_model)
    assert said[0] == "changed by patch_the_model"


@pytest.mark.parametrize("method", sorted(weight_watch.HARMLESS))
def test_vllms_calls_that_change_nothing_are_left_alone(engine: Any, said: list[str], method: str) -> None:
    engine.collective_rpc(method)
    assert said == [f"called {method}"]


def test_other_connectors_and_an_engine_that_is_only_being_made_are_left_alone(engine: Any, said: list[str]) -> None:
    engine.scheduler.connector = None
    engine.collective_rpc("reload_weights")
    del engine.scheduler
    engine.collective_rpc("reload_weights")
    assert said == ["called reload_weights"] * 2


def test_without_an_ssd_tier_nothing_is_done() -> None:
    link = SsdLink(SimpleNamespace(secondary_tiers=[object()]))
    link.arrived(SimpleNamespace(request_id="a", lora_request=object()))  # type: ignore[arg-type]
    assert not link.weights_changed("reload_weights")
    link.caches_were_reset()
    assert not SsdLink(object()).weights_changed("reload_weights")

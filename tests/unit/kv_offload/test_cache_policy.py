"""Our eviction policies under vLLM's own CPU manager."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.kv_offload.engine import Request, key
from vllm_pd.kv_offload import cache_policy, policies
from vllm_pd.tier_choices import DEFAULT_EVICTION, EVICTIONS
from vllm_pd.vllm_compat import CachePolicyFactory

pytestmark = pytest.mark.vllm


@pytest.fixture(params=policies.POLICIES)
def manager(request: pytest.FixtureRequest) -> Any:
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    cache_policy.register()
    return CPUOffloadingManager(8, cache_policy=request.param, enable_events=True)


class Serving(Request):
    """A request whose copies take no time."""

    def __init__(self, manager: Any, name: str) -> None:
        super().__init__(manager, name)
        self.place = 0

    def keys(self, numbers: list[int]) -> list[Any]:
        made = [key(number) for number in numbers]
        for place, name in enumerate(made, 1):
            self.context.set_offload_key_position(name, place * 32)
        return made

    def write(self, numbers: list[int], *, success: bool = True) -> list[Any] | None:
        """Offer blocks; returns who had to go, or None if there was no room."""
        output = self.manager.prepare_store(self.keys(numbers), self.context)
        if output is None:
            return None
        self.manager.complete_store(output.keys_to_store, self.context, success)
        return list(output.evicted_keys)


def held(manager: Any, numbers: range) -> list[int]:
    request = Request(manager, "look")
    return [number for number in numbers if manager.lookup(key(number), request.context).name == "HIT"]


def test_the_end_of_the_prompt_goes_first_and_is_announced(manager: Any) -> None:
    first = Serving(manager, "a")
    assert first.write(list(range(8))) == []
    first.finish()
    second = Serving(manager, "b")
    assert second.write([100, 101]) == [key(7), key(6)]
    second.finish()
    removed = [event.keys for event in manager.take_events() if event.removed]
    assert removed == [[key(7), key(6)]]
    assert held(manager, range(8)) == list(range(6))


def test_blocks_being_loaded_stay_and_what_does_not_fit_is_refused_whole(manager: Any) -> None:
    first = Serving(manager, "a")
    first.write(list(range(8)))
    first.finish()
    reader = Serving(manager, "b")
    manager.prepare_load(reader.keys([0, 1, 2, 3]), reader.context)
    assert Serving(manager, "c").write(list(range(200, 205))) is None
    assert held(manager, range(8)) == list(range(8))
    assert Serving(manager, "d").write(list(range(300, 304))) is not None
    assert held(manager, range(8)) == [0, 1, 2, 3]
    manager.complete_load(reader.keys([0, 1, 2, 3]), reader.context)
    reader.finish()


def test_a_failed_store_leaves_room_and_no_trace(manager: Any) -> None:
    request = Serving(manager, "a")
    request.write([1, 2], success=False)
    assert held(manager, range(4)) == []
    assert request.write(list(range(10, 18))) == []
    assert held(manager, range(10, 18)) == list(range(10, 18))


def test_a_reset_forgets_everything(manager: Any) -> None:
    request = Serving(manager, "a")
    request.write(list(range(8)))
    manager.reset_cache()
    assert held(manager, range(8)) == []
    assert Serving(manager, "b").write(list(range(20, 28))) == []


def test_vllm_keeps_lru_and_arc_and_knows_the_rest_by_name() -> None:
    cache_policy.register()
    cache_policy.register()
    assert tuple(policies.POLICIES) == EVICTIONS and DEFAULT_EVICTION in EVICTIONS
    for name in EVICTIONS:
        made = CachePolicyFactory.get_cache_policy_cls(name)
        assert issubclass(made, cache_policy.PolicyAdapter) == (name not in ("lru", "arc"))

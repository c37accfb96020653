"""A URL opens a registry, or says why not."""

from __future__ import annotations

import pytest

from tests.conformance.registry import LEASE_MS, live, worker
from vllm_pd.errors import SettingsError
from vllm_pd.state import MemoryRegistry, open_registry
from vllm_pd.state.redis_registry import RedisRegistry


@pytest.mark.parametrize(
    "url", ["redis://h:1/2", "rediss://u:p@h:1", "unix:///run/redis.sock", "redis+sentinel://h/p", "rediss+cluster://h"]
)
def test_redis_urls_open_without_connecting(url: str) -> None:
    assert isinstance(open_registry(url, "n"), RedisRegistry)


async def test_memory_is_shared_by_name_within_the_process() -> None:
    one, same, other = (open_registry(f"memory://{name}", "n") for name in ("shared", "shared", "else"))
    assert isinstance(one, MemoryRegistry)
    await one.heartbeat(worker(), LEASE_MS)
    assert await live(same) == [worker()]
    assert await live(other) == []


@pytest.mark.parametrize("url", ["reddis://u:s3cret@h", "http://h", "localhost:6379", ""])
def test_an_unknown_scheme_names_the_known_ones_and_no_secret(url: str) -> None:
    with pytest.raises(SettingsError, match=r"redis://, rediss://, unix://, .*memory://") as error:
        open_registry(url, "n")
    assert "s3cret" not in str(error.value)


def test_a_near_miss_is_named() -> None:
    with pytest.raises(SettingsError, match="did you mean 'redis'"):
        open_registry("reddis://h", "n")


@pytest.mark.parametrize("url", ["redis://h", "memory://"])
def test_a_namespace_is_checked_whatever_the_store(url: str) -> None:
    with pytest.raises(SettingsError, match="--pd-namespace"):
        open_registry(url, "a b")

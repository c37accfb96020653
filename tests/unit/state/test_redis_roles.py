"""What only a real server can show of wanted roles."""

from __future__ import annotations

import redis

from tests.conformance.registry import LEASE_MS, POOL
from vllm_pd.graph.embedded_store import EmbeddedStore
from vllm_pd.state import Epoch, Role, WantedRole, WorkerId
from vllm_pd.state.keys import Keys
from vllm_pd.state.redis_roles import RedisRoles

KEY = Keys("test").roles(POOL.id)
WISH = WantedRole(Role.PREFILL, Epoch(7))


async def test_the_key_ends_by_itself_and_foreign_fields_cost_only_themselves() -> None:
    with EmbeddedStore() as store, redis.Redis.from_url(store.url) as client:
        roles = RedisRoles(store.url, "test", timeout_s=5.0)
        client.hset(
            KEY, mapping={"bad:1": "x", "bad:2": "99999999999999:7:boss:0::", "ended:1": "5:7:both:0::", b"\xff": ""}
        )
        assert await roles.set(POOL.id, WorkerId("a:1"), WISH, LEASE_MS)
        assert await roles.set(POOL.id, WorkerId("bad:1"), WISH, LEASE_MS)
        assert await roles.get(POOL.id) == {WorkerId("a:1"): WISH, WorkerId("bad:1"): WISH}
        assert roles.malformed_total == 2
        assert await roles.of(POOL.id, WorkerId("bad:2")) is None
        assert roles.malformed_total == 3
        assert not client.hexists(KEY, "ended:1")
        assert 0 < client.pttl(KEY) <= LEASE_MS
        await roles.close()

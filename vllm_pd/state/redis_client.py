"""From a store URL to a redis-py client: one server, a socket, the primary that Sentinels name, or a cluster.

A client tries each call once; whoever calls keeps the deadline and decides about another try. What redis-py does by
itself is bounded by that deadline: asking Sentinels for the primary, following MOVED, asking a cluster for its layout.
"""

from __future__ import annotations

import asyncio
from typing import Any

import redis.asyncio
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import RedisClusterException

from vllm_pd.state.store_url import StoreUrl, Topology


def make_client(url: StoreUrl, *, timeout_s: float, longest_s: float) -> Any:
    """A `redis.asyncio.Redis` or, for a cluster, `RedisCluster`. Connecting happens at the first call, never here.

    Args:
        timeout_s: deadline of an ordinary call, and hence of connecting.
        longest_s: of the longest call; callers keep shorter deadlines themselves, and this one is the net under a
            connection that they gave up.
    """
    options: dict[str, Any] = {
        "protocol": 2,
        "retry": _once(),
        "socket_connect_timeout": timeout_s,
        "socket_timeout": max(timeout_s, longest_s),
        "username": url.username or None,
        "password": url.password or None,
        "client_name": url.client_name or None,
    }
    if url.topology is Topology.SOCKET:
        return redis.asyncio.Redis(unix_socket_path=url.path, db=url.db, **options)
    options["socket_keepalive"] = True
    if url.tls is not None:
        options |= {"ssl": True, **url.tls}
    if url.topology is Topology.SENTINEL:
        return _primary(url, timeout_s, options)
    if url.topology is Topology.CLUSTER:
        options["socket_connect_timeout"] = _share(url, timeout_s)
        # The nodes take the options of the client.
        return RedisCluster(startup_nodes=[ClusterNode(host, port) for host, port in url.hosts], **options)
    ((host, port),) = url.hosts
    return redis.asyncio.Redis(host=host, port=port, db=url.db, **options)


def _primary(url: StoreUrl, timeout_s: float, options: dict[str, Any]) -> Any:
    share = _share(url, timeout_s)
    asking = {name: value for name, value in options.items() if name.startswith("ssl") or name == "protocol"}
    asking |= {
        "retry": _once(),
        "socket_connect_timeout": share,
        "socket_timeout": share,
        "username": url.sentinel_username or None,
        "password": url.sentinel_password or None,
    }
    return Sentinel(url.hosts, sentinel_kwargs=asking).master_for(url.primary, db=url.db, **options)


def _once() -> Retry:
    return Retry(NoBackoff(), 0)


def _share(url: StoreUrl, timeout_s: float) -> float:
    """Hosts are asked in turn: each may take only so long that the others still get their turn within one call."""
    return timeout_s / (len(url.hosts) + 1)


def after_failure(client: Any) -> None:
    """Tell a cluster's client that a call failed: before the next one it asks for the layout.

    By itself it does so neither for calls that were given up at their deadline nor for pipelines, and would go on
    with a node that another one has replaced.
    """
    if isinstance(client, RedisCluster):
        client._initialize = True
        # Not of the same node first each time: it may be the one that is silent.
        nodes = client.nodes_manager.startup_nodes
        first = next(iter(nodes))
        nodes[first] = nodes.pop(first)


def reason(error: Exception) -> str:
    """What went wrong, in a few words: redis-py's own may be a page of connection options."""
    if isinstance(error, MasterNotFoundError):
        if "AuthenticationError" in str(error):
            return "a Sentinel refused sentinel_username or sentinel_password"
        return "no Sentinel that answers knows a primary of this name that is up"
    if isinstance(error, RedisClusterException) and error.__cause__ is not None:
        return f"no node of it can be asked: {str(error.__cause__).rstrip('.')}"
    return str(error).rstrip(".") or type(error).__name__


async def close_client(client: Any) -> None:
    """Release every connection of a client. Idempotent; raises RedisError or OSError."""
    pool = getattr(client, "connection_pool", None)
    sentinels = pool.sentinel_manager.sentinels if isinstance(pool, SentinelConnectionPool) else []
    await asyncio.gather(*(each.aclose() for each in [client, *sentinels]))

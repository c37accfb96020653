"""Ways to run a store, each as real processes: one server, TLS with client certificates, a cluster, Sentinels."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import redis

from scripts.redis7 import NoRedisError, find
from tests.certificates import Authority
from tests.conformance.tls_front import TlsFront
from vllm_pd.graph.embedded_store import EmbeddedStore, find_binary
from vllm_pd.graph.ports import LOOPBACK, free_port, free_ports

SLOTS = 16384
DEADLINE_S = 60.0
PRIMARY = "main"
_NODE_ID = 40


@dataclass(frozen=True)
class Deployment:
    """A running store: the URL that users give, and its servers, which tests may also ask or break themselves."""

    url: str
    servers: tuple[EmbeddedStore, ...]

    def clear(self) -> None:
        """Make it forget all keys."""
        for server in self.servers:
            with redis.Redis.from_url(server.url) as client:
                if client.info("replication")["role"] == "master":
                    client.flushall()


def until(holds: Callable[[], bool], what: str) -> None:
    """Wait for it, with a deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, f"it did not happen: {what}"
        time.sleep(0.02)


def redis7() -> Path:
    """A Redis server, or skip the test and say why there is none."""
    try:
        return find()
    except NoRedisError as e:
        pytest.skip(f"Redis 7 is not here: {e}")


@contextmanager
def valkey() -> Iterator[Deployment]:
    with EmbeddedStore() as store:
        yield Deployment(store.url, (store,))


@contextmanager
def redis_server() -> Iterator[Deployment]:
    with EmbeddedStore(binary=redis7()) as store:
        yield Deployment(store.url, (store,))


@contextmanager
def tls() -> Iterator[Deployment]:
    """A store that speaks TLS and wants a certificate of its clients: Redis, or Valkey behind a front.

    The Valkey that tests have is built without TLS. A plain port beside it is for the tests' own use.
    """
    with TemporaryDirectory() as folder, ExitStack() as stack:
        authority = Authority(Path(folder))
        own, client = authority.issue("server"), authority.issue("client")
        try:
            binary, port = find(), free_port()
        except NoRedisError:
            store = stack.enter_context(EmbeddedStore())
            port = stack.enter_context(TlsFront(store.port, authority.server_context(own, wants_certificate=True))).port
        else:
            options = {
                "tls-port": str(port),
                "tls-ca-cert-file": str(authority.pem),
                "tls-cert-file": str(own.pem),
                "tls-key-file": str(own.key),
                "tls-auth-clients": "yes",
            }
            store = stack.enter_context(EmbeddedStore(binary=binary, options=options))
        files = f"ssl_ca_certs={authority.pem}&ssl_certfile={client.pem}&ssl_keyfile={client.key}"
        yield Deployment(f"rediss://{LOOPBACK}:{port}?{files}", (store,))


@contextmanager
def cluster_node() -> Iterator[Deployment]:
    """One node in cluster mode that has every slot, asked as if it were an ordinary server: no CROSSSLOT."""
    with cluster(1) as deployment:
        yield Deployment(deployment.servers[0].url, deployment.servers)


@contextmanager
def cluster_of_three() -> Iterator[Deployment]:
    """Three nodes, of which the URL names one."""
    with cluster(3) as deployment:
        yield deployment


@contextmanager
def cluster(count: int) -> Iterator[Deployment]:
    """`count` nodes that share the slots evenly. They are born knowing each other: meeting takes seconds."""
    ports = free_ports(2 * count)
    ids = [f"{n:x}" * _NODE_ID for n in range(1, count + 1)]
    with TemporaryDirectory() as folder, ExitStack() as stack:
        servers = []
        for me in range(count):
            lines = []
            for n in range(count):
                first, last = SLOTS * n // count, SLOTS * (n + 1) // count - 1
                flags = "myself,master" if n == me else "master"
                place = f"{LOOPBACK}:{ports[n]}@{ports[count + n]}"
                lines.append(f"{ids[n]} {place} {flags} - 0 0 {n + 1} connected {first}-{last}")
            known = Path(folder, f"nodes-{me}.conf")
            known.write_text("\n".join([*lines, f"vars currentEpoch {count} lastVoteEpoch 0", ""]))
            options = {
                "cluster-enabled": "yes",
                "cluster-port": str(ports[count + me]),
                "cluster-config-file": str(known),
                "cluster-node-timeout": "2000",
            }
            servers.append(stack.enter_context(EmbeddedStore(port=ports[me], options=options)))
        for server in servers:
            with redis.Redis.from_url(server.url) as client:
                until(lambda: client.execute_command("CLUSTER INFO")["cluster_state"] == "ok", "all slots are served")
        yield Deployment(f"redis+cluster://{LOOPBACK}:{ports[0]}", tuple(servers))


@contextmanager
def sentinel() -> Iterator[Deployment]:
    """A primary, its replica and one Sentinel, which makes the replica primary half a second after a death."""
    with TemporaryDirectory() as folder, ExitStack() as stack:
        primary = stack.enter_context(EmbeddedStore(options={"repl-diskless-sync-delay": "0"}))
        follow = {"replicaof": f"{LOOPBACK} {primary.port}", "repl-diskless-sync-delay": "0"}
        replica = stack.enter_context(EmbeddedStore(options=follow))
        with redis.Redis.from_url(replica.url) as client:
            until(lambda: client.info("replication")["master_link_status"] == "up", "the replica follows")
        # A server that is called so is a Sentinel.
        binary = Path(folder, "valkey-sentinel")
        binary.symlink_to(find_binary())
        options = {
            "sentinel monitor": f"{PRIMARY} {LOOPBACK} {primary.port} 1",
            "sentinel down-after-milliseconds": f"{PRIMARY} 500",
            "sentinel failover-timeout": f"{PRIMARY} 10000",
        }
        watcher = stack.enter_context(EmbeddedStore(binary=binary, options=options))
        with redis.Redis.from_url(watcher.url) as client:
            until(lambda: len(client.sentinel_slaves(PRIMARY)) == 1, "the Sentinel knows the replica")
        yield Deployment(f"redis+sentinel://{LOOPBACK}:{watcher.port}/{PRIMARY}", (primary, replica))

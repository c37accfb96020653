"""The registry in Redis (or Valkey, 6.2 or newer).

Leases are measured by the store's clock, inside scripts. Every call has one deadline for all its round trips and is
never repeated: a caller that wants to try again does so at its own pace. One instance belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AskError,
    AuthenticationError,
    AuthorizationError,
    ClusterDownError,
    MovedError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import TimeoutError as RedisTimeoutError

from vllm_pd.errors import SettingsError, StoreError
from vllm_pd.layered import redact
from vllm_pd.state import codec, scripts
from vllm_pd.state.base import (
    Epoch,
    HeartbeatResult,
    PoolId,
    RegistrySnapshot,
    TokenizerFiles,
    WorkerId,
    WorkerLoad,
    WorkerRecord,
    WorkerState,
)
from vllm_pd.state.keys import Keys

logger = logging.getLogger(__name__)

_POOL_ID = re.compile(rb"[0-9a-f]{16}")
_CLUSTER = "point --pd-store at a server that holds every slot, not at one node of a larger cluster"
# redis-py drops the error code of errors it has a class for; inside a script's error the code stays in the text.
_REMEDIES: tuple[tuple[type[ResponseError], str, str], ...] = (
    (OutOfMemoryError, "OOM ", "raise its maxmemory"),
    (ReadOnlyError, "READONLY ", "point --pd-store at the primary"),
    (MovedError, "MOVED ", _CLUSTER),
    (AskError, "ASK ", _CLUSTER),
    (ClusterDownError, "CLUSTERDOWN ", "assign all its slots"),
    (NoPermissionError, "NOPERM ", "give its user read, write and scripting rights on keys that begin with {pd:"),
)


class RedisRegistry:
    """Implements `Registry` over redis-py.

    Args:
        url: `redis://`, `rediss://` or `unix://`, as redis-py reads it (`?ssl_ca_certs=FILE` and so on).
        namespace: clusters of different namespaces share a store without seeing each other.
        timeout_s: deadline of one call.
        bulk_timeout_s: deadline of a call that moves tokenizer files (tens of megabytes).

    Raises:
        SettingsError: malformed URL or namespace. Connecting happens at the first call, never here.
    """

    def __init__(self, url: str, namespace: str, *, timeout_s: float = 0.5, bulk_timeout_s: float = 10.0) -> None:
        self.keys = Keys(namespace)
        # Whatever follows the question mark may hold a password too.
        self.address = redact(url).partition("?")[0]
        self.malformed_total = 0
        """Entries of the store that were skipped because they could not be read, since the start."""
        self._reported: frozenset[str] = frozenset()
        self._timeout_s = timeout_s
        self._bulk_timeout_s = bulk_timeout_s
        options: dict[str, Any] = {
            "protocol": 2,
            "retry": Retry(NoBackoff(), 0),
            "socket_connect_timeout": timeout_s,
            # The deadline of a call is kept by `_answer`; this one is the net under a connection that it gave up.
            "socket_timeout": max(timeout_s, bulk_timeout_s),
        }
        if not url.startswith("unix://"):
            options["socket_keepalive"] = True
        try:
            self._client = redis.asyncio.Redis.from_url(url, **options)
            # Unknown options in the URL show only when a connection object is made; this one is not connected.
            self._client.connection_pool.make_connection()
        except (ValueError, TypeError, RedisError):
            # The original text may quote a piece of a password that is not percent-encoded.
            raise SettingsError(
                f"The store URL {self.address} is malformed; write redis://[user:password@]host:port[/db], "
                "with special characters of the password percent-encoded."
            ) from None

    async def heartbeat(self, record: WorkerRecord, lease_ms: int) -> HeartbeatResult:
        pool = record.pool.id
        async with self._answer(self._timeout_s):
            reply: bytes = await self._client.eval(
                scripts.HEARTBEAT,
                3,
                self.keys.workers(pool),
                self.keys.worker(pool, record.id),
                self.keys.load(pool, record.id),
                record.id,
                record.epoch,
                lease_ms,
                codec.encode_record(record),
            )
            result = HeartbeatResult(reply.decode())
            if result is not HeartbeatResult.STALE:
                # Another slot, hence another command; the next heartbeat repairs it if only this one is lost.
                await self._client.eval(scripts.TOUCH_POOL, 1, self.keys.pools, pool, lease_ms)
        return result

    async def publish_load(
        self, worker: WorkerId, pool: PoolId, writer: int, loads: Mapping[int, WorkerLoad], ttl_ms: int
    ) -> None:
        async with self._answer(self._timeout_s):
            await self._client.eval(
                scripts.PUBLISH_LOAD, 1, self.keys.load(pool, worker), writer, ttl_ms, codec.encode_loads(loads)
            )

    async def withdraw(self, worker: WorkerId, pool: PoolId, epoch: Epoch) -> bool:
        async with self._answer(self._timeout_s):
            removed: int = await self._client.eval(
                scripts.WITHDRAW,
                3,
                self.keys.workers(pool),
                self.keys.worker(pool, worker),
                self.keys.load(pool, worker),
                worker,
                epoch,
            )
        return bool(removed)

    async def snapshot(self) -> RegistrySnapshot:
        """Three round trips, however many pools and workers there are. One unreadable entry costs only itself."""
        bad: list[str] = []
        states: list[WorkerState] = []
        async with self._answer(self._timeout_s):
            pools = await self._live_pools(bad)
            members = await self._live_members(pools, bad)
            async with self._client.pipeline(transaction=False) as pipe:
                for pool, worker, *_ in members:
                    pipe.hget(self.keys.worker(pool, worker), "record")
                    pipe.hgetall(self.keys.load(pool, worker))
                replies = await _execute(pipe)
        for (pool, worker, now, ends), record, loads in zip(members, replies[0::2], replies[1::2], strict=True):
            if record is None:
                # Evicted, or ended since the second round trip.
                continue
            decoded = _decode_record(record, pool, worker)
            if decoded is None:
                bad.append(self.keys.worker(pool, worker))
                continue
            entries, unreadable = _decode_loads(loads, now)
            if unreadable:
                bad.append(self.keys.load(pool, worker))
            states.append(WorkerState(decoded, int(ends - now), codec.merge_loads(entries)))
        self._report(bad)
        return codec.assemble(states)

    async def put_tokenizer(self, pool: PoolId, files: TokenizerFiles, ttl_ms: int) -> str:
        sha = files.sha
        key = self.keys.tokenizer(pool, sha)
        async with self._answer(self._bulk_timeout_s):
            if not await self._client.pexpire(key, ttl_ms):
                await self._client.set(key, codec.encode_tokenizer(files), px=ttl_ms)
        return sha

    async def get_tokenizer(self, pool: PoolId, sha: str) -> TokenizerFiles | None:
        key = self.keys.tokenizer(pool, sha)
        async with self._answer(self._bulk_timeout_s):
            data: bytes | None = await self._client.get(key)
        if data is None:
            return None
        files = codec.decode_tokenizer(data, sha)
        self._report([] if files else [key])
        return files

    async def close(self) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._client.aclose()
        except (TimeoutError, RedisError, OSError):
            # The connections end with the process or the loop; there is nothing left to release.
            logger.debug("closing the store's connections took too long")

    async def _live_pools(self, bad: list[str]) -> list[PoolId]:
        _, flat = await self._client.eval(scripts.LIVE, 1, self.keys.pools)
        names: list[bytes] = flat[0::2]
        good = [name for name in names if _POOL_ID.fullmatch(name)]
        if len(good) < len(names):
            bad.append(self.keys.pools)
        return [PoolId(name.decode()) for name in good]

    async def _live_members(
        self, pools: Sequence[PoolId], bad: list[str]
    ) -> list[tuple[PoolId, WorkerId, float, float]]:
        """(pool, worker, the store's time, end of its lease), times in ms."""
        async with self._client.pipeline(transaction=False) as pipe:
            for pool in pools:
                pipe.eval(scripts.LIVE, 1, self.keys.workers(pool))
            replies = await _execute(pipe)
        members = []
        for pool, reply in zip(pools, replies, strict=True):
            if isinstance(reply, ResponseError):
                bad.append(self.keys.workers(pool))
                continue
            now, flat = reply
            for name, ends in zip(flat[0::2], flat[1::2], strict=True):
                try:
                    members.append((pool, WorkerId(name.decode()), float(now), float(ends)))
                except UnicodeDecodeError:
                    bad.append(self.keys.workers(pool))
        return members

    def _report(self, bad: Sequence[str]) -> None:
        """Count what was skipped; say it once for as long as the same keys are bad."""
        self.malformed_total += len(bad)
        keys = frozenset(bad)
        if keys - self._reported:
            logger.warning(
                "Skipped %d entries of the store that cannot be read, %s among them; another program or version wrote "
                "them: give it another namespace, or delete the keys.",
                len(keys),
                min(keys),
            )
        self._reported = keys

    @asynccontextmanager
    async def _answer(self, timeout_s: float) -> AsyncIterator[None]:
        """Bound a call and turn every failure into one sentence without secrets."""
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except (TimeoutError, RedisTimeoutError):
            raise StoreError(
                f"The store {self.address} did not answer within {timeout_s:g} s; check that it runs, is reachable and "
                "is not overloaded."
            ) from None
        except (AuthenticationError, AuthorizationError):
            raise StoreError(
                f"The store {self.address} refused the user or password; correct them in the store URL."
            ) from None
        except ResponseError as e:
            raise StoreError(f"The store {self.address} answered {str(e)!r}; {_remedy(e)}.") from None
        except (RedisError, OSError) as e:
            reason = str(e).rstrip(".") or type(e).__name__
            raise StoreError(
                f"The store {self.address} cannot be used ({reason}); start it, or correct the store URL."
            ) from None


def _remedy(error: ResponseError) -> str:
    if "WRONGTYPE" in str(error):
        return "another program uses keys that begin with {pd:; delete them, or give --pd-namespace another name"
    for kind, code, remedy in _REMEDIES:
        if isinstance(error, kind) or code in str(error):
            return remedy
    return "check that it is Redis or Valkey, 6.2 or newer"


async def _execute(pipe: Any) -> list[Any]:
    """Run a pipeline; a key of a wrong type stays in the result as its error, any other error is raised."""
    replies: list[Any] = await pipe.execute(raise_on_error=False)
    for reply in replies:
        if isinstance(reply, Exception) and not (isinstance(reply, ResponseError) and "WRONGTYPE" in str(reply)):
            raise reply
    return replies


def _decode_record(reply: bytes | ResponseError, pool: PoolId, worker: WorkerId) -> WorkerRecord | None:
    """The record, or None when it is unreadable or speaks of another worker than its key."""
    if isinstance(reply, ResponseError):
        return None
    try:
        record = codec.decode_record(reply)
    except ValueError:
        return None
    return record if record.id == worker and record.pool.id == pool else None


def _decode_loads(
    reply: Mapping[bytes, bytes] | ResponseError, now_ms: float
) -> tuple[list[dict[int, WorkerLoad]], bool]:
    """Load entries that have not ended, and whether some were unreadable."""
    if isinstance(reply, ResponseError):
        return [], True
    entries, unreadable = [], False
    for value in reply.values():
        ends, _, payload = value.partition(b":")
        try:
            if float(ends) > now_ms:
                entries.append(codec.decode_loads(payload))
        except ValueError:
            unreadable = True
    return entries, unreadable

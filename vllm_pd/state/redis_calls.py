"""Calls on a Redis server: one deadline each, no repetition, and every failure as one sentence without secrets."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Sequence
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
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import TimeoutError as RedisTimeoutError

from vllm_pd.errors import SettingsError, StoreError
from vllm_pd.layered import redact

logger = logging.getLogger(__name__)

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


def make_client(url: str, *, timeout_s: float, longest_s: float) -> Any:
    """The redis-py client behind a store URL. Connecting happens at the first call, never here.

    Args:
        timeout_s: deadline of connecting.
        longest_s: of the longest call; callers keep shorter deadlines themselves, and this one is the net under a
            connection that they gave up.

    Raises:
        SettingsError: malformed URL.
    """
    options: dict[str, Any] = {
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
        "socket_connect_timeout": timeout_s,
        "socket_timeout": max(timeout_s, longest_s),
    }
    if not url.startswith("unix://"):
        options["socket_keepalive"] = True
    try:
        client = redis.asyncio.Redis.from_url(url, **options)
        # Unknown options in the URL show only when a connection object is made; this one is not connected.
        client.connection_pool.make_connection()
    except (ValueError, TypeError, RedisError):
        # The original text may quote a piece of a password that is not percent-encoded.
        raise SettingsError(
            f"The store URL {address_of(url)} is malformed; write redis://[user:password@]host:port[/db], "
            "with special characters of the password percent-encoded."
        ) from None
    return client


def address_of(url: str) -> str:
    """A store URL as it may be shown: whatever follows the question mark may hold a password too."""
    return redact(url).partition("?")[0]


class Script:
    """A Lua script, sent by its digest once the server knows it."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()

    async def run(self, client: Any, keys: Sequence[str], args: Sequence[object]) -> Any:
        try:
            return await client.evalsha(self._sha, len(keys), *keys, *args)
        except NoScriptError:
            return await client.eval(self._text, len(keys), *keys, *args)


class RedisCalls:
    """A client and the rules of calling it. One instance belongs to one event loop.

    Args:
        url: store URL.
        timeout_s: deadline of an ordinary call, seconds.
        longest_s: the longest deadline that any call has, seconds.

    Raises:
        SettingsError: malformed URL.
    """

    def __init__(self, url: str, *, timeout_s: float, longest_s: float) -> None:
        self.address = address_of(url)
        self.client = make_client(url, timeout_s=timeout_s, longest_s=longest_s)
        self.timeout_s = timeout_s
        self.malformed_total = 0
        """Entries of the store that were skipped because they could not be read, since the start."""
        self._reported: frozenset[str] = frozenset()

    @asynccontextmanager
    async def answer(self, timeout_s: float | None = None) -> AsyncIterator[None]:
        """Bound a call (by `timeout_s` seconds, else as usual) and turn every failure into `StoreError`."""
        limit = self.timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(limit):
                yield
        except (TimeoutError, RedisTimeoutError):
            raise StoreError(
                f"The store {self.address} did not answer within {limit:g} s; check that it runs, is reachable and "
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

    def report(self, bad: Sequence[str]) -> None:
        """Count entries that were skipped; say it once for as long as the same keys are bad."""
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

    async def close(self) -> None:
        """Release connections. Idempotent."""
        try:
            async with asyncio.timeout(self.timeout_s):
                await self.client.aclose()
        except (TimeoutError, RedisError, OSError):
            # The connections end with the process or the loop; there is nothing left to release.
            logger.debug("closing the store's connections took too long")


async def execute(pipe: Any) -> list[Any]:
    """Run a pipeline; a key of a wrong type stays in the result as its error, any other error is raised."""
    replies: list[Any] = await pipe.execute(raise_on_error=False)
    for reply in replies:
        if isinstance(reply, Exception) and not (isinstance(reply, ResponseError) and "WRONGTYPE" in str(reply)):
            raise reply
    return replies


def _remedy(error: ResponseError) -> str:
    if "WRONGTYPE" in str(error):
        return "another program uses keys that begin with {pd:; delete them, or give --pd-namespace another name"
    for kind, code, remedy in _REMEDIES:
        if isinstance(error, kind) or code in str(error):
            return remedy
    return "check that it is Redis or Valkey, 6.2 or newer"

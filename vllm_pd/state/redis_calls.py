"""Calls on a Redis server: one deadline each, no repetition, and every failure as one sentence without secrets."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

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
    RedisClusterException,
    RedisError,
    ResponseError,
)
from redis.exceptions import TimeoutError as RedisTimeoutError

from vllm_pd.background import CANCEL_AGAIN_S
from vllm_pd.errors import StoreError
from vllm_pd.state.redis_client import after_failure, close_client, make_client, reason
from vllm_pd.state.store_url import parse_store_url

logger = logging.getLogger(__name__)

_CLUSTER = "it is a node of a cluster: begin the store URL with redis+cluster://"
_CLOSED = "the handler is closed"
"""In uvloop's RuntimeError about a write to a connection that was reset a moment ago; asyncio's own loop drops it."""
# redis-py drops the error code of errors it has a class for; inside a script's error the code stays in the text.
_REMEDIES: tuple[tuple[type[ResponseError], str, str], ...] = (
    (OutOfMemoryError, "OOM ", "raise its maxmemory"),
    (ReadOnlyError, "READONLY ", "point --pd-store at the primary"),
    (MovedError, "MOVED ", _CLUSTER),
    (AskError, "ASK ", _CLUSTER),
    (ClusterDownError, "CLUSTERDOWN ", "assign all its slots"),
    (NoPermissionError, "NOPERM ", "give its user read, write and scripting rights on keys that begin with {pd:"),
)


class Script:
    """A Lua script, sent by its digest once the server knows it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()

    async def run(self, client: Any, keys: Sequence[str], args: Sequence[object]) -> Any:
        try:
            return await client.evalsha(self._sha, len(keys), *keys, *args)
        except NoScriptError:
            return await client.eval(self.text, len(keys), *keys, *args)


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
        where = parse_store_url(url)
        self.address = where.address
        self.client = make_client(where, timeout_s=timeout_s, longest_s=longest_s)
        self.timeout_s = timeout_s
        self.malformed_total = 0
        """Entries of the store that were skipped because they could not be read, since the start."""
        self._reported: frozenset[str] = frozenset()

    @asynccontextmanager
    async def answer(self, timeout_s: float | None = None) -> AsyncIterator[None]:
        """Bound a call (by `timeout_s` seconds, else as usual) and turn every failure into `StoreError`."""
        limit = self.timeout_s if timeout_s is None else timeout_s
        try:
            # Twice: the first cancellation may be lost (see `background.end_tasks`), and the call would then last as
            # long as the socket's own timeout, which is made for the longest of all calls.
            async with asyncio.timeout(limit + CANCEL_AGAIN_S), asyncio.timeout(limit):
                yield
        except (TimeoutError, RedisTimeoutError):
            after_failure(self.client)
            raise StoreError(
                f"The store {self.address} did not answer within {limit:g} s; check that it runs, is reachable and "
                "is not overloaded."
            ) from None
        except (AuthenticationError, AuthorizationError):
            raise self._refused() from None
        except ResponseError as e:
            raise StoreError(f"The store {self.address} answered {str(e)!r}; {_remedy(e)}.") from None
        except (RedisError, RedisClusterException, OSError, RuntimeError) as e:
            if isinstance(e, RuntimeError) and _CLOSED not in str(e):
                raise
            after_failure(self.client)
            if isinstance(e.__cause__, AuthenticationError):
                raise self._refused() from None
            raise StoreError(
                f"The store {self.address} cannot be used ({reason(e)}); start it, or correct the store URL."
            ) from None

    def _refused(self) -> StoreError:
        return StoreError(f"The store {self.address} refused the user or password; correct them in the store URL.")

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
                await close_client(self.client)
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

"""The loop of the router's background tasks, and their end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

_CANCEL_AGAIN_S = 0.1

_log = logging.getLogger(__name__)


async def repeat(action: Callable[[], Awaitable[None]], interval: float) -> None:
    """Call `action` every `interval` seconds until cancelled.

    An error that nobody foresaw costs one round, not the task: without it the list of workers would freeze. Of equal
    errors in a row only the first is logged.
    """
    last = ""
    while True:
        try:
            await action()
            last = ""
        except Exception as e:
            if last != repr(e):
                last = repr(e)
                _log.exception("looking for workers failed, trying again every %g s", interval)
        await asyncio.sleep(interval)


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended, however they end.

    Once is not enough: `asyncio.wait_for` of Python 3.11, which redis-py uses, loses a cancellation that comes at the
    moment when what it waits for is done.
    """
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        ended, pending = await asyncio.wait(pending, timeout=_CANCEL_AGAIN_S)
        for task in ended:
            if not task.cancelled() and (error := task.exception()) is not None:
                _log.debug("a background task ended with an error", exc_info=error)

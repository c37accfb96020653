"""The loop of the router's background tasks, and their end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from vllm_pd.background import end_tasks

__all__ = ["end_tasks", "repeat"]

_log = logging.getLogger(__name__)


async def repeat(action: Callable[[], Awaitable[None]], interval: float) -> None:
    """Call `action` every `interval` seconds until cancelled.

    An error that nobody foresaw costs one round, not the task: otherwise the list of workers, say, would freeze. Of
    equal errors in a row only the first is logged.
    """
    last = ""
    while True:
        try:
            await action()
            last = ""
        except Exception as e:
            if last != repr(e):
                last = repr(e)
                _log.exception("a background task failed, it is tried again every %g s", interval)
        await asyncio.sleep(interval)

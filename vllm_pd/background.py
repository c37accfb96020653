"""The end of background tasks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

CANCEL_AGAIN_S = 0.1
"""Seconds after which a cancellation that had no effect is taken for lost."""

_log = logging.getLogger(__name__)


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended, however they end.

    Once is not enough: `asyncio.wait_for` of Python 3.11, which redis-py uses, loses a cancellation that comes at the
    moment when what it waits for is done.
    """
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        ended, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)
        for task in ended:
            if not task.cancelled() and (error := task.exception()) is not None:
                _log.debug("a background task ended with an error", exc_info=error)

"""One running planner: its parts put together from its settings, for the command and for the router."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Callable
from functools import partial
from typing import Protocol

from prometheus_client import CollectorRegistry

from vllm_pd.background import end_tasks
from vllm_pd.errors import SettingsError
from vllm_pd.planner.actuator import Actuator
from vllm_pd.planner.actuators.choose import Actuators, open_actuator
from vllm_pd.planner.actuators.context import ActuatorContext
from vllm_pd.planner.leader import Leadership, steady_s
from vllm_pd.planner.loop import PlannerLoop
from vllm_pd.planner.metrics import PlannerMetrics, PoolStatus, current
from vllm_pd.planner.model import AddAction, Mode
from vllm_pd.planner.observe import Observer
from vllm_pd.planner.settings import PlannerSettings
from vllm_pd.state.base import PoolId, Role
from vllm_pd.state.open_registry import (
    open_demand,
    open_planner_board,
    open_prefill_queue,
    open_registry,
    open_roles,
)

STORE_TIMEOUT_S = 5.0
"""Nobody waits for a planner; but a lease must not end while it is renewed."""
_CLOSE_S = 5.0

_log = logging.getLogger(__name__)


class _Closing(Protocol):
    async def close(self) -> None: ...


def new_planner_id() -> str:
    """Where it runs, and something that no other planner has."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"


class PlannerService:
    """Make it and call its methods inside one event loop.

    Args:
        registry: where its metrics go; one of its own if None.
        actuator: instead of those that the settings name.
        clock: seconds, see `leader.steady_s`.

    Raises:
        SettingsError: the store's URL or an actuator cannot be used.
    """

    def __init__(
        self,
        settings: PlannerSettings,
        *,
        registry: CollectorRegistry | None = None,
        actuator: Actuator | None = None,
        clock: Callable[[], float] = steady_s,
    ) -> None:
        store, namespace, config = settings.store, settings.namespace, settings.config
        self.id = new_planner_id()
        self.metrics = registry or CollectorRegistry()
        statuses: dict[PoolId, PoolStatus] = {}
        timeout_s = min(STORE_TIMEOUT_S, settings.lease / 3)
        workers = open_registry(store, namespace, timeout_s=timeout_s)
        roles = open_roles(store, namespace, timeout_s=timeout_s)
        demand = open_demand(store, namespace, timeout_s=timeout_s)
        queue = open_prefill_queue(store, namespace, timeout_s=timeout_s)
        board = open_planner_board(store, namespace, timeout_s=timeout_s, dry=settings.dry_run)
        self._stores: list[_Closing] = [workers, roles, demand, queue, board]
        leadership = self._leadership = Leadership(board, self.id, settings.lease, clock)
        self.statuses = partial(current, statuses, leadership.leads)
        """By pool, as the newest step saw it."""
        if actuator is None:
            context = ActuatorContext(
                store,
                namespace,
                workers,
                roles,
                move_timeout_s=settings.move_timeout,
                deadline_s=settings.actuator_timeout,
                webhook_token=settings.webhook_token,
                mandate=leadership,
            )
            actuator = Actuators([open_actuator(name, context) for name in settings.actuators])
        self._actuator = actuator
        if config.mode is Mode.SCALE and not actuator.can(AddAction(Role.DECODE, 1, "")):
            raise SettingsError(
                "With --mode scale somebody must start workers, which no actuator given can; name one with --actuator."
            )
        self._loop = PlannerLoop(
            config,
            Observer(workers, demand, queue, roles, actuator, config, clock),
            board,
            leadership,
            actuator,
            PlannerMetrics(
                self.metrics, config, planner=self.id, dry_run=settings.dry_run, statuses=self.statuses, clock=clock
            ),
            statuses,
            settle_s=settings.settle,
            dry_run=settings.dry_run,
            clock=clock,
        )
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to plan. Does not wait for the store or for anything else."""
        self._task = asyncio.create_task(self._loop.run())
        self._task.add_done_callback(_report_crash)
        _log.info("planner %s begins", self.id)

    async def stop(self) -> None:
        """Let others lead, and close everything. What was begun goes on. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            await end_tasks([task])
            # Not in that task, which is cancelled until it has ended.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await self._leadership.resign()
        stores, self._stores = self._stores, []
        closing: list[_Closing] = [self._actuator, *stores] if stores else []
        for each in closing:
            try:
                async with asyncio.timeout(_CLOSE_S):
                    await each.close()
            except TimeoutError:
                _log.debug("%s did not close its connections in time", type(each).__name__)
            except Exception:
                # The others are to be closed all the same.
                _log.exception("%s could not be closed", type(each).__name__)


def _report_crash(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("the planner ended, and plans nothing any more", exc_info=error)

"""What a planner that runs by itself answers over HTTP: its metrics, whether it lives, what it decided last."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from vllm_pd.errors import SettingsError
from vllm_pd.planner.metrics import PoolStatus, roles_now, roles_wanted
from vllm_pd.state.base import PoolId, Role


def status_json(planner: str, dry_run: bool, statuses: Mapping[PoolId, PoolStatus]) -> dict[str, Any]:
    """This planner as JSON: the pools that it leads, with its newest verdict about each."""
    return {
        "planner": planner,
        "dry_run": dry_run,
        "pools": {
            pool: {
                "leads": status.leads,
                "verdict": status.plan.verdict if status.plan is not None else None,
                "workers": _by_name(roles_now(status.view)) if status.view is not None else None,
                "wanted": _by_name(roles_wanted(status.view, status.plan))
                if status.view is not None and status.plan is not None
                else None,
            }
            for pool, status in statuses.items()
        },
    }


def _by_name(counts: Mapping[Role, int]) -> dict[str, int]:
    return {str(role): count for role, count in counts.items()}


class PlannerPage:
    """Serves `/metrics`, `/health` and `/v1/planner`."""

    def __init__(self, metrics: CollectorRegistry, status: Callable[[], Mapping[str, Any]]) -> None:
        self._metrics = metrics
        self._status = status
        app = web.Application()
        app.router.add_get("/metrics", self._show_metrics)
        app.router.add_get("/health", self._show_health)
        app.router.add_get("/v1/planner", self._show_status)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        self.port = 0
        """The bound port, once started."""

    async def start(self, host: str, port: int) -> None:
        """Listen; port 0 picks a free one. Raises SettingsError when the address cannot be bound."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        try:
            await site.start()
        except OSError as e:
            await self._runner.cleanup()
            raise SettingsError(
                f"The planner cannot show its metrics on {host}:{port} ({e.strerror or e}); choose another "
                "--metrics-host or --metrics-port."
            ) from None
        self.port = int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Idempotent."""
        await self._runner.cleanup()

    async def _show_metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._metrics), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _show_health(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _show_status(self, request: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(self._status()), content_type="application/json")

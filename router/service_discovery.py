"""`GET /v1/sd`: the workers as scrape targets, in the form of Prometheus' HTTP service discovery.

A target keeps its labels for as long as the worker lives: its role is not among them, or each change of a role would
begin new series. `vllm_pd_router_worker_info` has the role.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

from vllm_pd.router.directory import Directory
from vllm_pd.router.replies import send_error, send_json
from vllm_pd.router.transport import ClientReply, ClientRequest
from vllm_pd.router.worker import Worker

PATH = "/v1/sd"


class ServiceDiscovery:
    """Lists every known worker, those in trouble included: their metrics say what is wrong."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    async def serve(self, request: ClientRequest, reply: ClientReply) -> None:
        """503 as long as nothing is known of any worker because the store has not answered: Prometheus then keeps the
        targets that it has, whereas an empty list would end their series."""
        workers, store = self._directory.workers, self._directory.store
        if not workers and store.configured and not store.up:
            await send_error(reply, 503, f"No worker is known: the store {store.problem or 'was not asked yet'}.")
            return
        await send_json(reply, 200, targets(workers))


def targets(workers: Iterable[Worker]) -> list[dict[str, Any]]:
    """One group for each worker, since each has labels of its own."""
    groups = []
    for worker in workers:
        url, record = urlsplit(worker.url), worker.record
        labels = {
            "__scheme__": url.scheme,
            "__metrics_path__": f"{url.path.rstrip('/')}/metrics",
            "worker": worker.id,
            "pool": worker.pool,
            "model": record.models[0] if record.models else record.pool.model,
        }
        groups.append({"targets": [url.netloc.rpartition("@")[2]], "labels": labels})
    return groups

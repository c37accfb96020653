"""Many mock workers in one process, each on a port of its own."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Sequence

import zmq
from aiohttp import web

from vllm_pd.errors import SettingsError
from vllm_pd.sim.mock_api import MockApi
from vllm_pd.sim.mock_faults import Faults
from vllm_pd.sim.mock_tokenizer import MockTokenizer
from vllm_pd.sim.mock_worker import MockConfig, MockWorker
from vllm_pd.state import open_block_index, open_prefill_queue, open_registry, open_roles
from vllm_pd.state.base import Registry, Role
from vllm_pd.state.block_index import BlockIndex
from vllm_pd.state.prefill_queue import PrefillQueue
from vllm_pd.state.roles import Roles

logger = logging.getLogger(__name__)

_SOCKETS_PER_WORKER = 4
_STOP_S = 0.5
_WORKERS_PER_CLIENT = 16
"""They share connections to the store: a real worker has a process for its own."""
_REGISTER_PAUSE_S = 0.1
_STORE_TIMEOUT_S = 2.0
"""Longer than a real worker's: hundreds of workers share this process."""


class MockHost:
    """Starts and stops the workers. All methods are for one loop.

    Args:
        config: of every worker.
        roles: one for each worker.
        tokenizer: of all of them.
        host: address to listen on and to be known under.
        port: of the first worker; the others have the ports after it. 0: the system chooses each.
        faults: what every worker does wrong from the start.
    """

    def __init__(
        self,
        config: MockConfig,
        roles: Sequence[Role],
        tokenizer: MockTokenizer,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        faults: Faults | None = None,
    ) -> None:
        self._config = config
        self._roles = roles
        self._tokenizer = tokenizer
        self._host = host
        self._first_port = port
        self._faults = faults or Faults()
        self._by_port: dict[int, MockWorker] = {}
        self._sites: dict[int, web.SockSite] = {}
        self._clients: list[Registry | BlockIndex | PrefillQueue | Roles] = []
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._runner = web.AppRunner(
            MockApi(self._find, self._fail).app(),
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=_STOP_S,
        )

    @property
    def workers(self) -> list[MockWorker]:
        """In order of their ports."""
        return list(self._by_port.values())

    async def start(self) -> None:
        """Listen and register. Raises SettingsError when a port is taken."""
        if self._config.kv_events:
            self._context = zmq.Context()
            self._context.set(zmq.MAX_SOCKETS, max(1023, _SOCKETS_PER_WORKER * len(self._roles)))
        await self._runner.setup()
        for i, role in enumerate(self._roles):
            port = await self._listen(self._first_port + i if self._first_port else 0)
            worker = MockWorker(self._config, f"http://{self._host}:{port}", role, self._tokenizer, self._context)
            worker.faults = self._faults
            self._by_port[port] = worker
        if self._config.store:
            for workers in _groups(self.workers, _WORKERS_PER_CLIENT):
                store, namespace = self._config.store, self._config.namespace
                registry = open_registry(store, namespace, timeout_s=_STORE_TIMEOUT_S)
                index = open_block_index(store, namespace, timeout_s=_STORE_TIMEOUT_S)
                queue = open_prefill_queue(store, namespace, timeout_s=_STORE_TIMEOUT_S)
                roles = open_roles(store, namespace, timeout_s=_STORE_TIMEOUT_S)
                self._clients += [registry, index, queue, roles]
                for worker in workers:
                    worker.register(registry, index, queue, roles)
                # Hundreds at once would keep each other from being in time.
                await asyncio.sleep(_REGISTER_PAUSE_S)

    async def stop(self) -> None:
        """Withdraw all, then close. Idempotent."""
        await asyncio.gather(*(worker.withdraw() for worker in self.workers))
        for worker in self.workers:
            worker.close()
        for client in self._clients:
            await client.close()
        await self._runner.cleanup()
        if self._context is not None:
            self._context.destroy(linger=0)

    async def _listen(self, port: int) -> int:
        listener = socket.socket(socket.AF_INET6 if ":" in self._host else socket.AF_INET)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((self._host, port))
        except OSError as e:
            listener.close()
            raise SettingsError(
                f"A mock worker cannot listen on {self._host}:{port} ({e.strerror}); choose another --host or --port."
            ) from None
        port = int(listener.getsockname()[1])
        site = self._sites[port] = web.SockSite(self._runner, listener, backlog=1024)
        await site.start()
        return port

    def _find(self, request: web.Request) -> MockWorker:
        """The worker whose port was asked, or for administration the one that `?worker=PORT` names."""
        named = request.query.get("worker") if request.path.startswith("/mock/") else None
        if named is not None:
            if not named.isdigit() or int(named) not in self._by_port:
                raise web.HTTPNotFound(text=f"There is no mock worker on port {named} in this process.")
            return self._by_port[int(named)]
        assert request.transport is not None
        return self._by_port[_port(request.transport)]

    async def _fail(self, worker: MockWorker) -> None:
        faults = worker.faults
        if faults.die:
            if len(self._by_port) == 1:
                logger.warning("dying, as asked")
                os._exit(1)
            worker.die()
        port = next(port for port, known in self._by_port.items() if known is worker)
        await self._sites.pop(port).stop()
        server = self._runner.server
        assert server is not None
        for connection in server.connections:
            transport = connection.transport
            if transport is not None and _port(transport) == port:
                transport.abort()
        if not faults.die:
            await asyncio.sleep(faults.refuse)
            await self._listen(port)


def _groups(workers: Sequence[MockWorker], size: int) -> list[Sequence[MockWorker]]:
    return [workers[i : i + size] for i in range(0, len(workers), size)]


def _port(transport: asyncio.BaseTransport) -> int:
    return int(transport.get_extra_info("sockname")[1])

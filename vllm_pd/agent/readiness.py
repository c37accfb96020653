"""This process's own HTTP server: where it is reached from within, and whether it serves yet."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass

_DEADLINE_S = 5.0
_LOOPBACK = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}
_REQUEST = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnServer:
    """Where the server of this process listens: a TCP address as bound, or a Unix socket."""

    host: str | None = None
    port: int = 0
    uds: str | None = None
    tls: bool = False

    async def serves(self) -> bool:
        """Whether it answers `/health` with anything but a server error. Returns within seconds; never raises."""
        try:
            async with asyncio.timeout(_DEADLINE_S):
                return await self._ask()
        except ssl.SSLError:
            # It speaks TLS, but wants something of the client that we do not have: somebody is there to refuse us.
            return True
        except (OSError, TimeoutError, ValueError):
            return False

    async def _ask(self) -> bool:
        if self.uds:
            reader, writer = await asyncio.open_unix_connection(
                self.uds, ssl=self.context(), server_hostname=self._name
            )
        else:
            reader, writer = await asyncio.open_connection(
                self.address, self.port, ssl=self.context(), server_hostname=self._name
            )
        try:
            writer.write(_REQUEST)
            await writer.drain()
            status = (await reader.readline()).split(b" ")
        except ConnectionError:
            status = []
        finally:
            writer.close()
        if len(status) < 2 or not status[1].isdigit():
            # A TLS server that wants a certificate of its clients hangs up after the handshake.
            return self.tls
        return int(status[1]) < 500

    @property
    def address(self) -> str:
        """Where it can be reached from this host, unless it has a Unix socket."""
        host = (self.host or "").strip("[]")
        return _LOOPBACK.get(host, host)

    @property
    def _name(self) -> str | None:
        return "localhost" if self.tls else None

    def context(self) -> ssl.SSLContext | None:
        """How to speak TLS with it; None if it does not."""
        if not self.tls:
            return None
        # This process asks itself: there is nobody to authenticate, and its certificate names another host.
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context

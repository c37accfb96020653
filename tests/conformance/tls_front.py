"""TLS in front of a server that speaks none, as stunnel would do it."""

from __future__ import annotations

import asyncio
import ssl
import threading

from vllm_pd.graph.ports import LOOPBACK

DEADLINE_S = 30.0


class TlsFront:
    """Decrypts for the server on `backend_port` what comes to `port`, in a thread of its own."""

    def __init__(self, backend_port: int, context: ssl.SSLContext) -> None:
        self._backend_port = backend_port
        self._context = context
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self.port = 0

    def __enter__(self) -> TlsFront:
        self._thread.start()
        assert self._started.wait(DEADLINE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(DEADLINE_S)

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._serve, LOOPBACK, 0, ssl=self._context)
        # A client without a certificate is cut off in the handshake, which is no news here.
        self._loop.set_exception_handler(lambda loop, context: None)
        self.port = server.sockets[0].getsockname()[1]
        self._started.set()
        await self._stop.wait()
        server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            from_backend, to_backend = await asyncio.open_connection(LOOPBACK, self._backend_port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(_pump(reader, to_backend), _pump(from_backend, writer))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()

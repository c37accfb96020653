"""The agent's question to its own HTTP server, over real sockets."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from vllm_pd.agent.readiness import OwnServer
from vllm_pd.graph.ports import free_port


def answering(status: str) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], object]:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n".encode())
        await writer.drain()
        writer.close()

    return handle


@asynccontextmanager
async def tcp(status: str, host: str = "127.0.0.1", context: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    async with await asyncio.start_server(answering(status), host, 0, ssl=context) as server:
        yield server.sockets[0].getsockname()[1]


@pytest.mark.parametrize(
    ("status", "serves"), [("200 OK", True), ("404 Not Found", True), ("503 Service Unavailable", False), ("", False)]
)
async def test_the_answer_of_health_counts(status: str, serves: bool) -> None:
    async with tcp(status) as port:
        assert await OwnServer(host="127.0.0.1", port=port).serves() is serves


@pytest.mark.parametrize("host", [None, "", "0.0.0.0"])
async def test_a_server_on_every_interface_is_asked_on_loopback(host: str | None) -> None:
    async with tcp("200 OK") as port:
        assert await OwnServer(host=host, port=port).serves()


async def test_a_port_that_nobody_listens_on_does_not_serve() -> None:
    assert not await OwnServer(host="127.0.0.1", port=free_port()).serves()


async def test_a_unix_socket_is_asked(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    assert not await OwnServer(uds=path).serves()
    async with await asyncio.start_unix_server(answering("200 OK"), path):
        assert await OwnServer(uds=path).serves()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate of another host, and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("there is no openssl to make a certificate")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    subject = ["-subj", "/CN=gpu-7.example", "-days", "1", "-nodes", "-newkey", "rsa:2048"]
    subprocess.run([openssl, "req", "-x509", *subject, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


@pytest.mark.parametrize("client_certificate", [False, True])
async def test_tls_needs_no_trusted_certificate(certificate: tuple[Path, Path], client_certificate: bool) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    if client_certificate:
        context.load_verify_locations(certificate[0])
        context.verify_mode = ssl.CERT_REQUIRED
    async with tcp("200 OK", context=context) as port:
        assert await OwnServer(host="127.0.0.1", port=port, tls=True).serves()

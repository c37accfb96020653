"""One process of a graph through its life: waits for what it needs, starts, serves, fails, starts again, ends.

Everything that blocks runs in threads, and for one instance never two at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from vllm_pd.errors import PDError
from vllm_pd.graph.model import RestartRule
from vllm_pd.graph.process import ManagedProcess, ProcessError, ProcessSpec, Ready
from vllm_pd.graph.processes import Launch, Spot
from vllm_pd.graph.status import InstanceStatus, Phase

_POLL_S = 0.2
_PROBE_EVERY_S = 5.0
_OBSERVE_EVERY_S = 60.0
_PING_TIMEOUT_S = 2.0
_START_GRACE_S = 5.0
_LOG_END_LINES = 15
_RUNNING_S = 2.0
"""A program that says nothing of itself counts as up after this time."""

_T = TypeVar("_T")


class Host(Protocol):
    """What an instance needs of its supervisor."""

    threads: Executor
    hurry: asyncio.Event
    """Nothing is worth waiting for any more."""
    rule: RestartRule

    def waits_for(self, component: str) -> str:
        """What the component still waits for; "" when it may start."""

    def launch(self, instance: Instance) -> Launch:
        """How it is to be started now. Blocks for a moment. Raises PDError."""

    def log_of(self, name: str) -> Path: ...

    async def started(self, instance: Instance) -> None:
        """It has a process now."""

    async def ended(self, instance: Instance) -> None:
        """That process and its family are gone."""

    def happened(self, text: str) -> None:
        """Tell whoever watches."""

    def turn(self, instance: Instance) -> asyncio.Lock | None:
        """Held while it starts, where only one may start at a time."""


@dataclass(slots=True)
class _Failure:
    why: str
    was_ready_s: float = 0.0


class Instance:
    """One process. `run` returns when it was told to `leave` and is gone."""

    def __init__(self, host: Host, name: str, component: str, spot: Spot) -> None:
        self.name = name
        self.component = component
        self.spot = spot
        self.process: ManagedProcess | None = None
        self.phase = Phase.WAITING
        self.failures = 0
        self.url = ""
        self._host = host
        self._since = self._up_last = time.monotonic()
        self._restarts = -1
        self._detail = ""
        self._log_end: tuple[str, ...] = ()
        self._leaving = asyncio.Event()
        self._again = asyncio.Event()
        self._launch: Launch | None = None
        self._was_up = False
        """Whether the present process was ever ready."""

    @property
    def is_leaving(self) -> bool:
        return self._leaving.is_set()

    @property
    def is_settled(self) -> bool:
        return self.phase in (Phase.READY, Phase.UNREADY, Phase.GIVEN_UP) or self.failures > 0

    @property
    def grace_s(self) -> float:
        """What its present process may take to end; 0 when there is none."""
        return self._launch.grace_s if self._launch is not None else 0.0

    @property
    def is_up(self) -> bool:
        return self.phase in (Phase.READY, Phase.UNREADY)

    def leave(self) -> None:
        """End it, for good. Idempotent; returns at once."""
        self._leaving.set()

    def again(self) -> None:
        """Start it anew, with a clean record. Returns at once."""
        self._again.set()

    def status(self, *, is_stuck: bool = False) -> InstanceStatus:
        return InstanceStatus(
            name=self.name,
            component=self.component,
            phase=self.phase,
            for_s=round(time.monotonic() - self._since, 1),
            down_for_s=0.0 if self.is_up else round(time.monotonic() - self._up_last, 1),
            pid=self.process.pid if self.process is not None and self.process.is_running else 0,
            url=self.url,
            place=str(self.spot.place),
            restarts=max(self._restarts, 0),
            failures=self.failures,
            is_stuck=is_stuck,
            grace_s=self.grace_s,
            detail=self._detail,
            log=str(self._host.log_of(self.name)),
            log_end=self._log_end if not self.is_up else (),
        )

    async def run(self) -> None:
        """Its whole life. Never raises for anything that its process does."""
        try:
            while not self.is_leaving and (waits := self._host.waits_for(self.component)):
                self._detail = f"for {waits}"
                await self._pause(_POLL_S)
            while not self.is_leaving:
                failure = await self._live()
                await self._end_process()
                if failure is not None and not self.is_leaving:
                    await self._recover(failure)
        finally:
            self._to(Phase.STOPPING)
            await self._end_process()
            self._to(Phase.ENDED)

    async def _live(self) -> _Failure | None:
        """From a start to the end; None when it is to leave or to start anew."""
        turn = self._host.turn(self)
        while turn is not None and turn.locked() and not self.is_leaving:
            self._detail = "for its turn to start on a shared GPU"
            await self._pause(_POLL_S)
        if self.is_leaving:
            return None
        async with turn or contextlib.nullcontext():
            self._again.clear()
            self._restarts += 1
            self._to(Phase.STARTING)
            started = time.monotonic()
            why = await self._come_up()
        if why is None:
            return None
        if why:
            return _Failure(why)
        self._log_end, self._was_up = (), True
        self._to(Phase.READY)
        self._host.happened(f"{self.name} is ready after {time.monotonic() - started:.0f} s")
        return await self._serve()

    async def _come_up(self) -> str | None:
        """Start it and wait until it is ready: "" then, a cause when it failed, None when it is to leave."""
        self.process, self._was_up = None, False
        try:
            self._launch = launch = await self._thread(self._host.launch, self)
            self.url = launch.url
            self.process = process = ManagedProcess(
                ProcessSpec(self.name, launch.command, self._host.log_of(self.name), launch.env)
            )
            await self._thread(process.start)
            await self._host.started(self)
        except (PDError, OSError) as e:
            return str(e).removeprefix(f"{self.name} ").rstrip(".")
        began = time.monotonic()
        ready = probe_of(launch.ready, began)
        while not self.is_leaving and not self._again.is_set():
            try:
                if await self._thread(process.probe, ready):
                    await self._thread(process.observe)
                    return ""
            except ProcessError:
                return await self._thread(how_it_ended, process)
            if time.monotonic() - began > launch.ready_s:
                self._log_end = tuple(await self._thread(process.tail, _LOG_END_LINES))
                return f"was not ready after {launch.ready_s:.0f} s"
            await self._pause(_POLL_S)
        return None

    async def _serve(self) -> _Failure | None:
        """Watch it while it runs."""
        process, launch, rule = self.process, self._launch, self._host.rule
        assert process is not None and launch is not None
        began = heard = time.monotonic()
        ready, alive = probe_of(launch.ready, began), probe_of(launch.alive, began)
        next_probe, next_look = began + _PROBE_EVERY_S, began + _OBSERVE_EVERY_S
        while not self.is_leaving and not self._again.is_set():
            now = time.monotonic()
            if not process.is_running:
                return _Failure(await self._thread(how_it_ended, process), now - began)
            if now >= next_probe:
                with contextlib.suppress(ProcessError):
                    is_ready = await self._thread(process.probe, ready)
                    if is_ready or await self._thread(process.probe, alive):
                        heard = time.monotonic()
                    self._show(is_ready, time.monotonic() - heard)
                next_probe = time.monotonic() + _PROBE_EVERY_S
                if rule.silent_s and time.monotonic() - heard > rule.silent_s:
                    return _Failure(f"did not answer for {rule.silent_s:.0f} s", now - began)
            if now >= next_look:
                await self._thread(process.observe)
                next_look = time.monotonic() + _OBSERVE_EVERY_S
            await self._pause(_POLL_S)
        return None

    def _show(self, is_ready: bool, silent_s: float) -> None:
        wanted = Phase.READY if is_ready else Phase.UNREADY
        self._detail = "" if is_ready else f"no answer for {silent_s:.0f} s" if silent_s > 1 else "it says so"
        if self.phase is not wanted:
            self._to(wanted, self._detail)

    async def _recover(self, failure: _Failure) -> None:
        """After a failure: wait for the next start, or to be told to try again."""
        rule = self._host.rule
        if failure.was_ready_s >= rule.healthy_s:
            self.failures = 0
        self.failures += 1
        if self.process is not None:
            self._log_end = tuple(await self._thread(self.process.tail, _LOG_END_LINES)) or self._log_end
        delay = rule.delay_after(self.failures)
        if delay is None:
            self._to(Phase.GIVEN_UP, failure.why)
            times = "once" if self.failures == 1 else f"{self.failures} times in a row"
            self._host.happened(f"{self.name} {failure.why}; it is given up after it failed {times}")
        else:
            self._to(Phase.BACKOFF, failure.why)
            self._host.happened(
                f"{self.name} {failure.why}; it starts again in {delay:.0f} s (failure {self.failures} in a row)"
            )
        until = time.monotonic() + delay if delay is not None else float("inf")
        while not self.is_leaving and not self._again.is_set() and time.monotonic() < until:
            await self._pause(min(_POLL_S, max(0.0, until - time.monotonic())))
        if self._again.is_set():
            self.failures = 0

    async def _end_process(self) -> None:
        """End it and its family, and free the shared memory that they leave."""
        process = self.process
        if process is None or self._launch is None:
            return
        if process.is_running:
            self._to(Phase.STOPPING, self._detail)
            await self._thread(process.terminate)
            # One that is still loading has nothing to hand over, and may not listen.
            deadline = time.monotonic() + (self._launch.grace_s if self._was_up else _START_GRACE_S)
            while process.is_running and time.monotonic() < deadline and not self._host.hurry.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_POLL_S / 2):
                        await self._host.hurry.wait()
        await self._thread(_finish, process)
        self._launch = None
        await self._host.ended(self)

    def _to(self, phase: Phase, detail: str = "") -> None:
        if self.is_up:
            self._up_last = time.monotonic()
        if phase is not self.phase:
            self._since = time.monotonic()
        self.phase, self._detail = phase, detail

    async def _pause(self, seconds: float) -> None:
        """Sleep, or less when it is told to leave."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._leaving.wait()

    async def _thread(self, call: Callable[..., _T], *args: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._host.threads, call, *args)


def how_it_ended(process: ManagedProcess) -> str:
    """`ended with status 1 (ValueError: ...)`: completes a sentence that begins with its name."""
    code = process.returncode
    if code is not None and code < 0:
        known = {int(number): number.name for number in signal.Signals}
        how = f"was ended by {known.get(-code, f'signal {-code}')}"
    else:
        how = f"ended with status {code}"
    cause = process.cause()
    return f"{how} ({cause})" if cause else how


def probe_of(url: str, began: float) -> Ready:
    """What asks whether a process is ready: see `Launch.ready`. `began`: when it was started, monotonic."""
    if url.startswith("redis://"):
        return lambda: _pings(url)
    return url or (lambda: time.monotonic() - began > _RUNNING_S)


def _pings(url: str) -> bool:
    """Whether a Redis-compatible server answers there; one that wants a password first does."""
    parts = urlsplit(url)
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=_PING_TIMEOUT_S) as s:
            s.sendall(b"PING\r\n")
            return s.recv(64).startswith((b"+PONG", b"-NOAUTH"))
    except OSError:
        return False


def _finish(process: ManagedProcess) -> None:
    """End what is left of its family, then free the shared memory that nobody uses."""
    process.kill()
    for path in process.left_shared_memory():
        with contextlib.suppress(OSError):
            Path(path).unlink()

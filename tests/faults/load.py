"""Clients that ask, one question after the other each, and write down what they get."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Sequence

import aiohttp

from tests.faults.questions import Question
from tests.faults.shot import Shot

_THREAD_DEADLINE_S = 30.0
_PAUSE_WHEN_UNREACHABLE_S = 0.25


class Load:
    """Runs in a thread of its own.

    Args:
        url: of the router.
        questions: asked in random order.
        clients: how many ask at once.
        deadline_s: what no request may take.
        cold, streams, pinned: parts, 0 to 1, of requests that no cache can help, that stream, and that have a seed,
            with which no stream goes on at another worker.
        label: part of the requests' names.
    """

    def __init__(
        self,
        url: str,
        model: str,
        questions: Sequence[Question],
        *,
        clients: int,
        deadline_s: float,
        cold: float = 0.5,
        streams: float = 0.6,
        pinned: float = 0.06,
        label: str = "x",
        seed: int = 1,
    ) -> None:
        self.shots: list[Shot] = []
        self._url, self._model, self._questions = url, model, questions
        self._clients, self._deadline_s, self._label = clients, deadline_s, label
        self._cold, self._streams, self._pinned = cold, streams, pinned
        self._chance = random.Random(seed)
        self._stopping = threading.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)

    def start(self) -> Load:
        self._thread.start()
        return self

    def stop(self) -> list[Shot]:
        """Ask no more, wait for the answers that are due, and return all requests. Each has its deadline."""
        self._stopping.set()
        self._thread.join(self._deadline_s + _THREAD_DEADLINE_S)
        assert not self._thread.is_alive(), "the load did not end within its deadline"
        return self.shots

    def in_flight(self) -> list[Shot]:
        """Requests that are not answered yet."""
        return [shot for shot in list(self.shots)[-4 * self._clients :] if not shot.ended]

    def leave(self, name: str) -> None:
        """The client of this request goes away now."""
        self._loop.call_soon_threadsafe(self._cancel, name)

    def leave_all(self) -> None:
        """All clients go away now, and ask no more."""
        self._stopping.set()
        for shot in self.in_flight():
            self.leave(shot.name)

    def __enter__(self) -> Load:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _cancel(self, name: str) -> None:
        if task := self._tasks.get(name):
            task.cancel()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._deadline_s)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
            await asyncio.gather(*(self._client(session) for _ in range(self._clients)))

    async def _client(self, session: aiohttp.ClientSession) -> None:
        while not self._stopping.is_set():
            shot = self._next()
            self.shots.append(shot)
            task = self._tasks[shot.name] = asyncio.ensure_future(self._ask(session, shot))
            await task
            del self._tasks[shot.name]
            if shot.problem == "unreachable":
                await asyncio.sleep(_PAUSE_WHEN_UNREACHABLE_S)

    def _next(self) -> Shot:
        chance, number = self._chance, len(self.shots)
        name = f"flt-{self._label}-{number}"
        fields: dict[str, object] = {}
        if chance.random() < self._cold:
            fields["cache_salt"] = f"{name}-{time.time_ns()}"
        is_pinned = chance.random() < self._pinned
        if is_pinned:
            fields["seed"] = number
        is_stream = chance.random() < self._streams
        return Shot(name, chance.choice(self._questions), is_stream, fields, can_continue=not is_pinned)

    async def _ask(self, session: aiohttp.ClientSession, shot: Shot) -> None:
        body = {"model": self._model, **shot.question.body, **shot.fields, "stream": shot.stream}
        shot.sent = time.monotonic()
        try:
            async with asyncio.timeout(self._deadline_s):
                headers = {"X-Request-Id": shot.name}
                async with session.post(self._url + shot.question.path, json=body, headers=headers) as answer:
                    shot.status = answer.status
                    shot.decision = answer.headers.get("x-vllm-pd-decision", "")
                    await self._read(answer, shot)
        except TimeoutError:
            shot.problem = "late"
        except asyncio.CancelledError:
            shot.problem = "left"
        except aiohttp.ClientConnectorError:
            shot.problem = "unreachable"
        except (aiohttp.ClientError, OSError, ValueError) as e:
            shot.problem = "broken"
            shot.error = shot.error or f"{type(e).__name__}: {e}"
        shot.ended = time.monotonic()

    async def _read(self, answer: aiohttp.ClientResponse, shot: Shot) -> None:
        if not answer.headers.get("content-type", "").startswith("text/event-stream"):
            shot.read_answer(await answer.read())
            return
        is_done = False
        with contextlib.closing(answer):
            async for line in answer.content:
                text = line.decode().strip()
                if not text.startswith("data:"):
                    continue
                data = text.removeprefix("data:").strip()
                if data == "[DONE]":
                    is_done = True
                elif shot.read_event(data):
                    now = time.monotonic()
                    shot.stall = max(shot.stall, now - shot.last) if shot.first else 0.0
                    shot.first, shot.last = shot.first or now, now
        if not is_done and not shot.error:
            shot.problem = "broken"
            shot.error = "the stream ended without an end"

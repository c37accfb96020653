"""A stream read as it comes, while something happens to the workers."""

from __future__ import annotations

import http.client
import json
import threading
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

DEADLINE_S = 120.0


@dataclass
class Stream:
    """One request that is streamed in a thread of its own; `events` grows meanwhile."""

    url: str
    path: str
    body: dict[str, Any]
    events: list[bytes] = field(default_factory=list)
    failure: str = ""
    decode: str = ""
    """The worker that a router chose for its answer, as `host:port`."""
    _thread: threading.Thread | None = None

    def start(self) -> Stream:
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        return self

    def _read(self) -> None:
        try:
            connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=DEADLINE_S)
            headers = {"content-type": "application/json", "x-vllm-pd-explain": "1"}
            connection.request("POST", self.path, json.dumps(self.body), headers)
            response = connection.getresponse()
            self.decode = json.loads(response.getheader("x-vllm-pd-decision", "{}")).get("decode", "")
            rest = b""
            while data := response.read1(1 << 16):
                *whole, rest = (rest + data).split(b"\n\n")
                self.events += whole
            if rest:
                self.events.append(rest)
            connection.close()
        except (OSError, http.client.HTTPException) as e:
            self.failure = repr(e)

    def wait_for(self, events: int) -> None:
        """Wait until so many events are there."""
        deadline = time.monotonic() + DEADLINE_S
        while len(self.events) < events:
            assert time.monotonic() < deadline and not self.failure, f"{len(self.events)} events; {self.failure}"
            time.sleep(0.002)

    def finish(self) -> Stream:
        """Wait for its end."""
        assert self._thread is not None
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive() and not self.failure, self.failure or "the stream did not end"
        return self

    @property
    def values(self) -> list[Any]:
        """The events' JSON, without `[DONE]`."""
        data = [event.strip().removeprefix(b"data: ") for event in self.events if event.strip()]
        return [json.loads(item) for item in data if item != b"[DONE]"]

    @property
    def answer(self) -> Any:
        """That of a request which was not streamed."""
        return json.loads(b"\n\n".join(self.events))

    @property
    def text(self) -> str:
        choices = [value["choices"][0] for value in self.values if value.get("choices")]
        return "".join(c["text"] if "text" in c else c["delta"].get("content") or "" for c in choices)

    @property
    def error(self) -> str:
        """What an error event says; empty without one."""
        return next((str(value["error"]["message"]) for value in self.values if "error" in value), "")

"""A stream's token ids, kept on the way to the client, so that another worker could continue it. Pure, no I/O.

vLLM puts the ids into its events if a request asks for them (`return_token_ids`): those of the prompt into the first
one, those of the answer into each. Without it the same places hold null. So what a client gets that did not ask is
made by writing null over the ids again, byte for byte what it would have got; a test compares the two.

An event is passed on when it is complete: a stream that breaks always ends between two events.

Text and ids do not end at the same place where a character has come in part: vLLM holds its bytes back. A stream can
be continued from `clean` ids on, behind which no text is held back. An event with several ids and a text may hide such
a part at its end; the last one of those is `unsure`.
"""

from __future__ import annotations

from array import array

import msgspec

from vllm_pd.router.continued_events import ContinuedEvents, Identity

_IDS = b'"token_ids":['
_PROMPT_IDS = b'"prompt_token_ids":['
_RUNNING = b'"finish_reason":null'
ABORTED = b'"finish_reason":"abort"'
"""How vLLM's server ends what it has when it is told to stop, or was told by somebody else to end the request."""
_EMPTY_DELTA = b'"delta":{}'
_DONE = b"data: [DONE]"
_ERROR = b'data: {"error"'
_USAGE_ONLY = b'"choices":[]'
_NULL = b"null"
_SERVER_ERROR = 500


class _Error(msgspec.Struct):
    code: int = _SERVER_ERROR
    message: str = ""


class _ErrorEvent(msgspec.Struct):
    error: _Error


_error = msgspec.json.Decoder(_ErrorEvent)
_identity = msgspec.json.Decoder(Identity)


class TokenTail:
    """Of one stream.

    Args:
        chat: whether it is a chat, else a completion.
        shows_ids: the client has asked for the ids and gets them.
    """

    __slots__ = (
        "_before",
        "_between",
        "_chat",
        "_continued",
        "_first",
        "_held",
        "_pending",
        "_shortest",
        "_shows_ids",
        "clean",
        "done",
        "failure",
        "finished",
        "ids",
        "off",
        "opaque",
        "prompt",
        "unsure",
        "usage_sent",
    )

    def __init__(self, *, chat: bool, shows_ids: bool = False) -> None:
        self._chat = chat
        self._shows_ids = shows_ids
        self._pending = b""
        self._first = self._held = b""
        self._before = self._between = b""
        self._shortest = 0
        self._continued: ContinuedEvents | None = None
        self.prompt = b""
        """The prompt's ids as they stand in JSON, without brackets; empty while they have not come."""
        self.ids: array[int] = array("Q")
        """Of the answer so far."""
        self.clean = 0
        self.unsure = False
        self.opaque = False
        """Ids do not tell what was sent: a parser of the worker stands between the model's text and the client."""
        self.off = False
        """The worker gives no ids; the rest of the stream passes as it comes."""
        self.finished = False
        """The last token has been sent."""
        self.usage_sent = False
        self.done = False
        """The stream's last event has been sent."""
        self.failure = ""
        """What the worker said when it gave the request up in mid-stream. Its event was not passed on."""

    @property
    def shows_counts(self) -> bool:
        """Whether the client was told how many tokens there are, text or not."""
        return self._shows_ids or b'"usage":{' in self._first

    @property
    def prompt_tokens(self) -> int:
        return self.prompt.count(b",") + 1 if self.prompt else 0

    def feed(self, data: bytes) -> bytes:
        """What the client gets for these bytes of the worker's: whole events. Nothing after a `failure`."""
        if self.off:
            return data
        if self._pending:
            data = self._pending + data
        out: list[bytes] = []
        at = 0
        while (end := data.find(b"\n\n", at)) >= 0:
            end += 2
            try:
                out.append(self._event(data[at:end]))
            except (ValueError, OverflowError):
                # Also `msgspec.DecodeError`. vLLM writes none that is not as expected.
                self.failure = "it sent an event that cannot be read"
            at = end
            if self.failure:
                break
            if self.off:
                out.append(data[at:])
                at = len(data)
        self._pending = data[at:]
        if not self._first and b"\r\n" in self._pending[:4096]:
            # Not vLLM: it ends lines otherwise, and no event would ever be found complete.
            self.off = True
            out.append(self._pending)
            self._pending = b""
        return out[0] if len(out) == 1 else b"".join(out)

    def restart(self) -> None:
        """The worker was lost before anything of its was passed on: another begins with the same."""
        self._pending = self._before = b""
        self.failure = ""
        if self._continued is None:
            self._first = self._held = self.prompt = b""
            self.opaque = False

    def _event(self, event: bytes) -> bytes:
        # Nearly all events of a stream differ in text and id alone.
        if event.startswith(self._before) and event.endswith(b"]}]}\n\n") and self._before:
            start = event.rfind(b"[") + 1
            if event.endswith(self._between, 0, start):
                ids = event[start:-6]
                if ids.isdigit():
                    self.ids.append(int(ids))
                    if start > self._shortest:
                        self.clean = len(self.ids)
                        self.unsure = False
                    return event if self._shows_ids else event[: start - 1] + b"null}]}\n\n"
        return self._any_event(event)

    def _any_event(self, event: bytes) -> bytes:
        if self._continued is not None:
            return self._continued_event(event)
        is_first = not self._first
        if is_first and event.startswith(b"data: {"):
            event = self._first_event(event)
            if self.off:
                return event
            if self._first and _IDS not in event:
                # A chat's first event says nothing, and the next one comes at once: only with it can be told whether a
                # parser is at work. A stream that breaks between the two has not begun.
                self._held = event
                return b""
        out = self._later_event(event, is_first=is_first)
        if self._held and not self.failure:
            out = self._held + out
            self._held = b""
        return out

    def _later_event(self, event: bytes, *, is_first: bool) -> bytes:
        start = event.find(_IDS)
        if start < 0:
            return self._other(event)
        if ABORTED in event:
            self.failure = "it gave the request up"
            return b""
        start += len(_IDS)
        end = event.index(b"]", start)
        running = _RUNNING in event
        if running and not is_first and not self._before:
            self._learn(event, start)
        self._note(event[start:end], empty=(b'"content":""' if self._chat else b'"text":""') in event)
        if not running:
            self.finished = True
        if self._chat and b'"delta":{"content":"' not in event:
            self.opaque = True
            if running and _EMPTY_DELTA in event and not self._shows_ids:
                # Without ids in it there would not have been an event.
                return b""
        return event if self._shows_ids else b"".join((event[: start - 1], _NULL, event[end + 1 :]))

    def _learn(self, event: bytes, ids_start: int) -> None:
        """What stands before the text of this event, and between the text and the ids, which begin at `ids_start`."""
        mark = b'"delta":{"content":"' if self._chat else b'"text":"'
        text_start = event.find(mark) + len(mark)
        between = b'"},"logprobs":null' if self._chat else b'","logprobs":null'
        text_end = event.find(between, text_start)
        if text_start >= len(mark) and text_end >= 0:
            self._before = event[:text_start]
            self._between = event[text_end:ids_start]
            self._shortest = text_start + len(self._between)

    def _note(self, ids: bytes, *, empty: bool) -> None:
        """The ids of one event, and whether no text came with them."""
        if not ids:
            return
        if b"," in ids:
            self.ids.extend(map(int, ids.split(b",")))
        else:
            self.ids.append(int(ids))
        if not empty:
            self.clean = len(self.ids)
            self.unsure = b"," in ids

    def _first_event(self, event: bytes) -> bytes:
        """Takes the prompt's ids out of the first event."""
        start = event.find(_PROMPT_IDS)
        if start < 0:
            if not event.startswith(_ERROR):
                self.off = True
            return event
        start += len(_PROMPT_IDS)
        end = event.index(b"]", start)
        self.prompt = event[start:end]
        self._first = b"".join((event[: start - 1], _NULL, event[end + 1 :]))
        return event if self._shows_ids else self._first

    def _other(self, event: bytes) -> bytes:
        """An event without ids of the answer."""
        if event.startswith(_DONE):
            self.done = True
        elif event.startswith(_ERROR):
            try:
                error = _error.decode(event[len("data: ") :]).error
            except msgspec.DecodeError:
                error = _Error()
            if error.code >= _SERVER_ERROR and not self.finished:
                self.failure = f"it said: {error.message}"
                return b""
        elif _USAGE_ONLY in event:
            self.usage_sent = True
        elif ABORTED in event:
            self.failure = "it gave the request up"
            return b""
        return event

    # Another worker continues.

    def resume(self, kept: int) -> None:
        """What is fed from now on continues the stream as a completion, from the first `kept` ids of the answer on."""
        del self.ids[kept:]
        self.clean = kept
        self.unsure = False
        self.failure = ""
        self._pending = self._before = b""
        identity = _identity.decode(self._first[len("data: ") :])
        self._continued = ContinuedEvents(
            identity, chat=self._chat, shows_ids=self._shows_ids, prompt_tokens=self.prompt_tokens, kept=kept
        )

    def _continued_event(self, event: bytes) -> bytes:
        assert self._continued is not None
        if not event.startswith(b"data: {") or event.startswith(_ERROR):
            return self._other(event)
        if ABORTED in event:
            self.failure = "it gave the request up"
            return b""
        made = self._continued.event(event[len("data: ") :])
        for text, ids, finish in made.tokens:
            if ids:
                self.ids.extend(ids)
                if text:
                    self.clean = len(self.ids)
                    self.unsure = len(ids) > 1
            elif text:
                self.opaque = True
            if finish is not None:
                self.finished = True
        if not made.tokens:
            self.usage_sent = True
        return made.data

    def ending(self, *, usage: bool) -> bytes:
        """What is missing where the last token was sent and then the worker was lost. `usage`: the client asked."""
        identity = _identity.decode(self._first[len("data: ") :])
        made = ContinuedEvents(
            identity, chat=self._chat, shows_ids=False, prompt_tokens=self.prompt_tokens, kept=len(self.ids)
        )
        self.done = True
        return (made.usage() if usage and not self.usage_sent else b"") + b"data: [DONE]\n\n"

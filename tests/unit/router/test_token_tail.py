"""Token ids taken out of streams: what the client gets, and from where another worker could go on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.router.teller import FIRST, PROMPT, Break, Teller
from vllm_pd.router.token_tail import TokenTail

FORMS = [
    (chat, options)
    for chat in (True, False)
    for options in ({}, {"include_usage": True, "continuous_usage_stats": True})
]


def stream(chat: bool, options: dict[str, Any], *, ids: bool, **teller: Any) -> bytes:
    body = {"max_tokens": 20, "stream_options": options, "return_token_ids": ids}
    return b"".join(Teller(**teller).events(body, chat=chat))


def fed(tail: TokenTail, data: bytes, size: int) -> bytes:
    return b"".join(tail.feed(data[at : at + size]) for at in range(0, len(data), size))


@pytest.mark.parametrize(("chat", "options"), FORMS)
@pytest.mark.parametrize("size", [1, 2, 7, 100, 1 << 20])
@pytest.mark.parametrize("merge", [1, 3])
def test_however_the_bytes_arrive_the_ids_become_null_again(
    chat: bool, options: dict[str, Any], size: int, merge: int
) -> None:
    tail = TokenTail(chat=chat)
    given = stream(chat, options, ids=True, merge=merge)
    assert fed(tail, given, size) == stream(chat, options, ids=False, merge=merge)
    assert json.loads(b"[" + tail.prompt + b"]") == PROMPT
    assert list(tail.ids) == list(range(FIRST, FIRST + 20))
    assert tail.finished and tail.done and not tail.failure
    shown = TokenTail(chat=chat, shows_ids=True)
    assert fed(shown, given, size) == given
    assert shown.ids == tail.ids


@pytest.mark.parametrize(("chat", "options"), FORMS)
def test_only_whole_events_are_passed_on(chat: bool, options: dict[str, Any]) -> None:
    given = stream(chat, options, ids=True)
    for end in range(0, len(given), 5):
        out = TokenTail(chat=chat).feed(given[:end])
        whole = given[:end].count(b"\n\n")
        # A chat's first event waits for its second.
        assert out.count(b"\n\n") == (0 if chat and whole == 1 else whole)
        assert not out or out.endswith(b"\n\n")


@pytest.mark.parametrize("how", ["abort", "error"])
@pytest.mark.parametrize("chat", [True, False])
def test_a_request_that_the_worker_gives_up_is_not_told_to_the_client(chat: bool, how: str) -> None:
    body = {"max_tokens": 20, "return_token_ids": True}
    given = b"".join(Teller().events(body, chat=chat, broken=Break(4, how)))
    tail = TokenTail(chat=chat)
    out = tail.feed(given)
    assert tail.failure
    assert not tail.finished and not tail.done
    assert b"abort" not in out and b"error" not in out and b"DONE" not in out
    assert len(tail.ids) == 4


def test_what_the_client_did_wrong_is_told_to_it() -> None:
    event = b'data: {"error":{"message":"no","type":"BadRequestError","param":null,"code":400}}\n\n'
    tail = TokenTail(chat=True)
    assert tail.feed(event + b"data: [DONE]\n\n") == event + b"data: [DONE]\n\n"
    assert tail.done and not tail.failure


@pytest.mark.parametrize(
    "given",
    [
        b'data: {"n":1}\n\ndata: {"n":',
        b'data: {"choices":[{"index":0,"delta":{}}]}\r\n\r\ndata: {"n":',
        b": ping\r\n\r\n",
    ],
)
def test_a_stream_of_another_server_passes_as_it_comes(given: bytes) -> None:
    tail = TokenTail(chat=True)
    assert tail.feed(given) == given
    assert tail.off
    assert tail.feed(b"anything") == b"anything"


def test_comments_between_events_pass() -> None:
    given = stream(True, {}, ids=True)
    assert TokenTail(chat=True).feed(b": ping\n\n" + given) == b": ping\n\n" + stream(True, {}, ids=False)


@pytest.mark.parametrize("chat", [True, False])
def test_text_that_looks_like_ids_stays(chat: bool) -> None:
    """A quote within a text has a backslash before it in JSON, so no text can look like a member."""
    tail = TokenTail(chat=chat)
    out = tail.feed(stream(chat, {}, ids=True))
    assert json.dumps('"token_ids":[7]').encode()[1:-1] in out


def test_a_leg_that_was_lost_before_its_first_event_leaves_nothing() -> None:
    tail = TokenTail(chat=False)
    given = stream(False, {}, ids=True)
    assert tail.feed(given[:50]) == b""
    tail.restart()
    assert tail.feed(given) == stream(False, {}, ids=False)


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("kept", [0, 1, 5, 11])
def test_a_continuation_has_the_form_of_the_stream(chat: bool, kept: int) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"max_tokens": 20, "stream_options": options, "return_token_ids": True}
    tail = TokenTail(chat=chat)
    tail.feed(b"".join(Teller().events(body, chat=chat, broken=Break(11, "cut"))))
    tail.resume(kept)
    rest = {**body, "max_tokens": 20 - kept, "prompt": [*PROMPT, *range(FIRST, FIRST + kept)]}
    more = fed(tail, b"".join(Teller(id="another").events(rest, chat=False)), 33)
    assert more.split(b"\n\n") == stream(chat, options, ids=False).split(b"\n\n")[kept + chat :]
    assert list(tail.ids) == list(range(FIRST, FIRST + 20))
    assert tail.finished and tail.done


@pytest.mark.parametrize("event", [b"{", b'{"choices":[{"text":1}]}', b'{"choices":[{"text":"\xff"}]}'])
def test_nonsense_of_the_worker_that_continues_counts_as_its_failure(event: bytes) -> None:
    body = {"max_tokens": 20, "return_token_ids": True}
    tail = TokenTail(chat=True)
    tail.feed(b"".join(Teller().events(body, chat=True, broken=Break(4, "cut"))))
    tail.resume(4)
    assert tail.feed(b"data: " + event + b"\n\n") == b""
    assert "cannot be read" in tail.failure
    assert len(tail.ids) == 4


@pytest.mark.parametrize("ids", [b"null,7", b"7", b"-1"])
def test_nonsense_in_place_of_ids_counts_as_a_failure(ids: bytes) -> None:
    given = stream(False, {}, ids=True)
    second = given.index(b"data:", 10)
    tail = TokenTail(chat=False)
    tail.feed(given[:second])
    event = b'data: {"choices":[{"index":0,"text":"a","finish_reason":null,"token_ids":[' + ids
    assert tail.feed(event + b"}\n\n" if ids == b"7" else event + b"]}]}\n\n") == b""
    assert "cannot be read" in tail.failure

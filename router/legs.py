"""The two bodies of a split request. Pure functions on bytes.

Prefill leg: the client's fields with one token to generate, minus what is about the answer. Values are carried as
raw JSON, so what shapes the prompt reaches both workers with the same bytes. Decode leg: the client's own bytes with
the transfer parameters spliced in. A body for a worker that schedules by priority gets its priority.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, Raw

from vllm_pd.holds import HOLD_FIELD

_ONE = Raw(b"1")
_FALSE = Raw(b"false")
_TRANSFER: dict[str, object] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

PRIORITY_HEADER = "x-vllm-priority"
"""vLLM takes it before the body's `priority`, if it is a whole number."""
PRIORITY_STEP = 1 << 44
"""Between two priorities of clients: more than the milliseconds since 1970 will be for centuries."""
MAX_PRIORITY = 1 << 18
"""vLLM's priorities have 64 bits."""

DROPPED_FOR_PREFILL = frozenset(
    {
        # Refused by vLLM beside max_tokens=1 or without the field that is dropped with them.
        "stream_options",
        "min_tokens",
        "top_logprobs",
        "logprob_token_ids",
        # Would end or multiply the one token, or cost work that nobody reads.
        "n",
        "best_of",
        "stop",
        "stop_token_ids",
        "include_stop_str_in_output",
        "logprobs",
        "echo",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "guided_decoding_backend",
        "guided_whitespace_pattern",
        "stream_interval",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "return_token_offsets",
        "return_prompt_text",
    }
)
"""`response_format` is not among them: some models' chat templates write it into the prompt."""

_object = msgspec.json.Decoder(dict[str, Raw])


class _PrefillAnswer(msgspec.Struct):
    kv_transfer_params: Raw = _FALSE


_answer = msgspec.json.Decoder(_PrefillAnswer)


def prefill_body(body: bytes, hold: str = "") -> bytes:
    """The body of the prefill leg.

    Args:
        hold: key under which the worker keeps the blocks, see `vllm_pd.holds`.

    Raises:
        msgspec.DecodeError: `body` is not a JSON object.
    """
    fields = {name: value for name, value in _object.decode(body).items() if name not in DROPPED_FOR_PREFILL}
    fields["max_tokens"] = _ONE
    if "max_completion_tokens" in fields:
        fields["max_completion_tokens"] = _ONE
    fields["stream"] = _FALSE
    fields["kv_transfer_params"] = Raw(msgspec.json.encode({**_TRANSFER, HOLD_FIELD: hold} if hold else _TRANSFER))
    return msgspec.json.encode(fields)


def transfer_params(answer: bytes) -> bytes | None:
    """The transfer parameters in a prefill worker's answer, as raw JSON; None when there are none to read from."""
    try:
        raw = bytes(_answer.decode(answer).kv_transfer_params)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return raw if raw.startswith(b"{") and raw != b"{}" else None


def own_priority(in_body: Any, in_header: str | None) -> Any:
    """The priority that vLLM would take from a client's request; UNSET if it names none."""
    try:
        return int(in_header) if in_header is not None else in_body
    except ValueError:
        return in_body


def combined_priority(own: Any, turn: int) -> int | None:
    """First what the client asks for, then the turn; None if they cannot be combined.

    Engines take the lowest first. A client's priority ranks its requests among all those of the cluster, of which most
    name none and have 0; among equals the turn decides.

    Args:
        own: the client's priority, UNSET if it named none.
        turn: milliseconds since 1970.
    """
    if own is UNSET:
        own = 0
    return own * PRIORITY_STEP + turn if isinstance(own, int) and abs(own) <= MAX_PRIORITY else None


def prioritised_body(body: bytes, own: Any, turn: int) -> bytes:
    """The same with a `combined_priority` as the last member, which wins; unchanged where that is none.

    Args:
        body: a JSON object with members.
    """
    priority = combined_priority(own, turn)
    if priority is None:
        return body
    end = body.rindex(b"}")
    return b"".join((body[:end], b',"priority":%d' % priority, body[end:]))


def decode_body(body: bytes, params: bytes) -> bytes:
    """The client's bytes with `params` as the first member of the object. `body` must be a non-empty JSON object."""
    brace = body.index(b"{") + 1
    return b"".join((body[:brace], b'"kv_transfer_params":', params, b",", body[brace:]))

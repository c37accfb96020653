"""What a mock worker does wrong when it is asked to."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from vllm_pd.errors import SettingsError

_Seconds = Annotated[float, msgspec.Meta(ge=0)]
_Count = Annotated[int, msgspec.Meta(ge=0)]


class Faults(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, frozen=True):
    """Faults of one worker; the default is none. Those of requests concern completions and chats.

    Attributes:
        times: the faults of requests end after so many requests; 0: they stay.
        refuse: for so many seconds the port is closed; connections are cut.
        unhealthy: /health answers 503.
        status: requests get this status, 429 and 503 with `retry-after: 1`.
        delay: seconds before a request is looked at.
        hang: requests get no byte of an answer.
        stall_after: streams stop after so many tokens, with the connection open.
        cut_after: streams are cut off after so many tokens.
        wrong_prefill: how the answer to a prefill is wrong: `missing`, `null` or `garbage` transfer parameters, or
            `gone` (right ones, but the blocks are given up at once).
        drop_events: part of the KV events that is not sent, 0 to 1.
        drop_replays: what is not sent is not there for replay either.
        die: the worker ends at once, as if killed.
    """

    times: _Count = 0
    refuse: _Seconds = 0.0
    unhealthy: bool = False
    status: Annotated[int, msgspec.Meta(ge=400, le=599)] | None = None
    delay: _Seconds = 0.0
    hang: bool = False
    stall_after: _Count | None = None
    cut_after: _Count | None = None
    wrong_prefill: str | None = None
    drop_events: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    drop_replays: bool = False
    die: bool = False

    def __post_init__(self) -> None:
        if self.wrong_prefill not in (None, "missing", "null", "garbage", "gone"):
            raise ValueError("wrong_prefill must be missing, null, garbage or gone")

    def without_request_faults(self) -> Faults:
        """What stays when `times` requests have been hit."""
        return Faults(
            unhealthy=self.unhealthy,
            drop_events=self.drop_events,
            drop_replays=self.drop_replays,
        )


def faults_from_json(body: bytes) -> Faults:
    """Read a JSON object. Raises SettingsError naming what is wrong."""
    try:
        return msgspec.json.decode(body, type=Faults)
    except msgspec.DecodeError as e:
        raise SettingsError(f"Not a set of faults: {e}.") from None


def faults_from_flags(flags: list[str]) -> Faults:
    """Read `NAME` or `NAME=VALUE` each. Raises SettingsError naming what is wrong."""
    values: dict[str, Any] = {}
    for flag in flags:
        name, separator, text = flag.partition("=")
        values[name.replace("-", "_")] = text if separator else True
    try:
        return msgspec.convert(values, Faults, strict=False)
    except msgspec.ValidationError as e:
        raise SettingsError(f"--fault: {e}; there are {', '.join(Faults.__struct_fields__)}.") from None

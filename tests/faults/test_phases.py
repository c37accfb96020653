"""The phase of a request is put together rightly from what engines and client saw."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.phases import Phase, Traces, where

DECODERS = frozenset({"decode-0", "decode-1"})


@pytest.mark.parametrize(
    ("steps", "has_streamed", "wanted"),
    [
        ({}, False, Phase.QUEUED),
        ({"prefill-0": "waiting"}, False, Phase.QUEUED),
        ({"prefill-0": "prefilling"}, False, Phase.PREFILLING),
        ({"prefill-0": "held"}, False, Phase.WAITING),
        ({"prefill-0": "gone"}, False, Phase.WAITING),
        ({"prefill-0": "held", "decode-0": "waiting"}, False, Phase.WAITING),
        ({"prefill-0": "held", "decode-0": "transferring"}, False, Phase.TRANSFERRING),
        ({"prefill-0": "gone", "decode-0": "decoding"}, False, Phase.DECODING),
        ({"prefill-0": "gone", "decode-0": "decoding"}, True, Phase.STREAMING),
        ({"decode-1": "prefilling"}, False, Phase.PREFILLING),
        ({"decode-1": "gone"}, True, Phase.STREAMING),
    ],
)
def test_phase(steps: dict[str, str], has_streamed: bool, wanted: Phase) -> None:
    assert where(steps, DECODERS, has_streamed=has_streamed).phase is wanted


def test_traces_are_read_as_they_grow(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    traces = Traces({"decode-0": path, "decode-1": tmp_path / "none"})
    traces.refresh()
    path.write_text("1.0 cmpl-flt-a-1-0-77aa waiting\n2.0 cmpl-somebody waiting\n3.0 chatcmpl-flt-a-2-99 trans")
    traces.refresh()
    assert traces.of("flt-a-1") == {"decode-0": "waiting"} and traces.of("flt-a-2") == {}
    with path.open("a") as file:
        file.write("ferring\n4.0 cmpl-flt-a-1-0-77aa decoding\n")
    traces.refresh()
    assert traces.of("flt-a-1") == {"decode-0": "decoding"}
    assert traces.of("flt-a-2") == {"decode-0": "transferring"}

"""Both ways in which blocks are read: by `BlockIO`, and in one call with what comes after it."""

from __future__ import annotations

import pytest

from vllm_pd.kv_offload.segments import reader


@pytest.fixture(params=["batched", "streamed"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which of them, whatever the length of the requests; `usefixtures` where it makes no difference."""
    chosen = str(request.param)
    monkeypatch.setattr(reader, "LONG_BYTES", 0 if chosen == "streamed" else 1 << 60)
    return chosen

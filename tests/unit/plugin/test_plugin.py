"""The plugin on a vLLM that it does not know."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from vllm_pd import plugin
from vllm_pd import vllm_compat as compat


class _Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def log() -> Iterator[_Log]:
    handler = _Log()
    plugin.logger.addHandler(handler)
    yield handler
    plugin.logger.removeHandler(handler)


def test_a_vllm_without_what_is_needed_keeps_working_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, log: _Log
) -> None:
    monkeypatch.delitem(compat.__dict__, "KVConnectorFactory", raising=False)
    gone = compat.Internal(
        "KVConnectorFactory", "vllm.no.such.module", "KVConnectorFactory", (), "where pd is registered"
    )
    monkeypatch.setitem(compat._BY_ALIAS, "KVConnectorFactory", gone)
    plugin.register()
    (line,) = log.lines
    assert "vllm.no.such.module" in line and "0.32 or 0.33" in line and "off" in line


@pytest.mark.vllm
def test_loading_the_plugin_again_changes_nothing() -> None:
    pytest.importorskip("vllm")
    plugin.register()
    before = compat.EngineArgs.add_cli_args
    plugin.register()
    assert compat.EngineArgs.add_cli_args is before

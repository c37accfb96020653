"""A parser and engine arguments as `vllm serve` makes them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from vllm_pd import serve_flags, side_channel


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No VLLM_PD_* variable of the developer's shell, and none of ours left behind."""
    for name in (
        *serve_flags.environment_names(),
        side_channel.HOST_ENV,
        side_channel.PORT_ENV,
        side_channel.OWNER_ENV,
    ):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def serve_parser() -> Any:
    pytest.importorskip("vllm")
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser())


@pytest.fixture
def engine_args(serve_parser: Any) -> Callable[..., Any]:
    """`engine_args("--role", "prefill", ...)`: the engine arguments of `vllm serve m` with these flags."""
    from vllm import AsyncEngineArgs

    def make(*argv: str) -> Any:
        return AsyncEngineArgs.from_cli_args(serve_parser.parse_args(["m", *argv]))

    return make


@pytest.fixture
def error_of(engine_args: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The one sentence with which `vllm serve` ends for these flags."""

    def run(*argv: str) -> str:
        with pytest.raises(SystemExit) as caught:
            engine_args(*argv)
        assert caught.value.code == 2
        lines = capsys.readouterr().err.strip().splitlines()
        return lines[-1]

    return run

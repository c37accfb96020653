"""The command `vllm-pd-router`."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from vllm_pd import __version__
from vllm_pd.errors import SettingsError
from vllm_pd.layered import settings_of
from vllm_pd.planner.settings import read_settings as read_planner_settings
from vllm_pd.router import settings as router_settings
from vllm_pd.router.service import RouterService
from vllm_pd.router.settings import RouterSettings
from vllm_pd.settings_file import read_file

_EPILOG = """examples:
  # find the workers in a store (they were started with --pd-store redis://10.0.0.2:6379)
  vllm-pd-router --store redis://10.0.0.2:6379 --host 0.0.0.0

  # without a store: name them
  vllm-pd-router --worker http://10.0.0.5:8000=prefill --worker http://10.0.0.6:8000=decode

  # the same settings from a file; flags and environment variables go before it
  vllm-pd-router --config router.yaml

Every flag but --config has an environment variable, named in brackets, and a key in the file: the flag's name
without dashes in front ("workers" for --worker, a list). Order: flag, environment, file, default.
"""


_LIST_METAVARS = {"workers": "URL=ROLE", "weights": "NAME=VALUE", "disagg_options": "NAME=VALUE"}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        _fail(f"{message}; see {self.prog} --help.")


def _fail(message: str) -> NoReturn:
    print(f"vllm-pd-router: error: {message}", file=sys.stderr)
    raise SystemExit(2)


def build_parser() -> argparse.ArgumentParser:
    """The parser; one flag for each field of `RouterSettings`."""
    parser = _Parser(
        allow_abbrev=False,
        prog="vllm-pd-router",
        description="One OpenAI endpoint for a cluster of vLLM prefill and decode workers.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"vllm-pd-router {__version__}")
    parser.add_argument("--config", metavar="FILE", help="YAML file with any of the settings below")
    defaults = RouterSettings()
    for name, spec in settings_of(RouterSettings).items():
        default = getattr(defaults, name)
        shown = "on" if default is True else default
        shown = f" (default: {shown})" if shown not in ("", (), False) else ""
        options: dict[str, Any] = {"dest": name, "default": None, "help": f"{spec.help}{shown} [{spec.env}]"}
        if default is False:
            options["action"] = "store_true"
        elif isinstance(default, tuple):
            options.update(action="append", metavar=_LIST_METAVARS[name])
        else:
            options["metavar"] = name.upper()
        parser.add_argument(spec.flag, **options)
    return parser


async def _serve(settings: RouterSettings) -> None:
    planner = None
    if settings.planner:
        own = {"store": settings.store, "namespace": settings.namespace}
        planner = read_planner_settings(own, settings.planner_config, os.environ)
    service = RouterService(settings, planner=planner)
    stopping = asyncio.Event()

    def on_signal(number: int) -> None:
        if stopping.is_set():
            # The second one means now: nothing is worth waiting for.
            os._exit(128 + number)
        logging.getLogger(__name__).info("stopping; a second signal ends at once")
        stopping.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    try:
        await service.start()
    except OSError as e:
        raise SettingsError(
            f"cannot listen on {settings.host}:{settings.port} ({e.strerror or e}); "
            "choose another --host or --port, or stop what uses it."
        ) from None
    # What is alive now stays; scanning it again in each collection would cost every request.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    try:
        await stopping.wait()
    finally:
        await service.stop()


def _loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def main(argv: Sequence[str] | None = None) -> int:
    """Run the router until a signal. Returns 0; a mistake in the settings ends with one sentence and status 2."""
    arguments = vars(build_parser().parse_args(argv))
    path = arguments.pop("config")
    try:
        file = read_file(path, flag="--config", example="port: 8080") if path else {}
        settings = router_settings.load(
            flags=arguments, environ=os.environ, file=file, file_name=path or "the settings file"
        ).value
    except SettingsError as e:
        _fail(str(e))
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_serve(settings))
    except SettingsError as e:
        _fail(str(e))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""vLLM's entry point into vllm-pd (`vllm.general_plugins`).

vLLM loads plugins in every process it starts, sometimes several times in one. `register` is therefore idempotent and
imports nothing heavy, and as long as nobody asks for the pd connector it changes nothing but the list of flags.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from typing import Any

from vllm_pd import serve_flags
from vllm_pd import vllm_compat as compat
from vllm_pd.errors import PDError, UnsupportedVLLMError
from vllm_pd.lmcache_options import CONNECTOR as LMCACHE
from vllm_pd.settings import CONNECTOR
from vllm_pd.vllm_compat.version import version_warning, vllm_version

logger = logging.getLogger("vllm.vllm_pd")
"""Below vLLM's own logger, whose handlers and level it shares."""

_MARK = "_vllm_pd_wrapped"


def register() -> None:
    """Register the connector and the serve flags with vLLM.

    With a vLLM that lacks what this needs, it says so and does nothing: whoever has vllm-pd installed but does not
    use it must not lose their server to it.
    """
    try:
        registry = compat.KVConnectorFactory._registry
        if CONNECTOR not in registry:
            compat.KVConnectorFactory.register_connector(CONNECTOR, "vllm_pd.connectors.pd_connector", "PDConnector")
        if LMCACHE not in registry:
            # A child of pd's, found by its name where vLLM puts its figures together.
            compat.KVConnectorFactory.register_connector(LMCACHE, "vllm_pd.connectors.lmcache_connector", LMCACHE)
        _declare_environment()
        _wrap_engine_args(compat.EngineArgs)
    except (UnsupportedVLLMError, AttributeError) as e:
        logger.warning("vllm-pd is off, its flags are not available: %s", e)


def _declare_environment() -> None:
    """Make vLLM know our variables: it warns about, and can refuse, any VLLM_* variable it does not know.

    The getters return None, since vLLM hashes every known variable into the key of its compilation cache.
    """
    known = compat.environment_variables
    for name in serve_flags.environment_names():
        if name in os.environ:
            known.setdefault(name, lambda: None)


def _wrap_engine_args(engine_args: Any) -> None:
    if getattr(engine_args.add_cli_args, _MARK, False):
        return
    add_cli_args = engine_args.add_cli_args
    from_cli_args = engine_args.from_cli_args.__func__
    create_engine_config = engine_args.create_engine_config

    @functools.wraps(add_cli_args)
    def add_cli_args_and_ours(parser: Any) -> Any:
        parser = add_cli_args(parser)
        serve_flags.add_flags(parser)
        _hide_store(parser)
        return parser

    @functools.wraps(from_cli_args)
    def from_cli_args_and_ours(cls: Any, args: Any) -> Any:
        made = from_cli_args(cls, args)
        try:
            _activate(made, args)
        except PDError as e:
            # A user's mistake: say so in a sentence, as the parser does, instead of a traceback.
            print(f"vllm-pd: error: {e}", file=sys.stderr)
            raise SystemExit(2) from e
        return made

    @functools.wraps(create_engine_config)
    def create_engine_config_and_ours(self: Any, *args: Any, **kwargs: Any) -> Any:
        serve_flags.complete(self)
        return create_engine_config(self, *args, **kwargs)

    setattr(add_cli_args_and_ours, _MARK, True)
    engine_args.add_cli_args = staticmethod(add_cli_args_and_ours)
    engine_args.from_cli_args = classmethod(from_cli_args_and_ours)
    engine_args.create_engine_config = create_engine_config_and_ours


def _hide_store(parser: Any) -> None:
    """vLLM logs the arguments as parsed: a store's password in `--kv-transfer-config` must not be among them."""
    action = parser._option_string_actions.get("--kv-transfer-config")
    if action is None or not callable(parse := action.type):
        return

    @functools.wraps(parse)
    def parse_and_hide(text: str) -> Any:
        return serve_flags.hide_store(parse(text))

    action.type = parse_and_hide


def _activate(engine_args: Any, args: Any) -> None:
    settings = serve_flags.resolve(engine_args, args)
    if settings is None:
        return
    if warning := version_warning(vllm_version()):
        logger.warning("%s", warning)
    from vllm_pd import worker_setup

    worker_setup.prepare(settings, engine_args, args)

"""Prints, as JSON, what an ordinary `vllm serve MODEL` is made of. Run with and without vllm-pd loaded."""

from __future__ import annotations

import json
import re
import socket
import sys
from typing import Any

connections: list[str] = []


def record(original: Any) -> Any:
    def connect(self: socket.socket, address: Any, *rest: Any) -> Any:
        if self.family != socket.AF_UNIX and self.type != socket.SOCK_DGRAM:
            connections.append(str(address))
        return original(self, address, *rest)

    return connect


def main() -> None:
    socket.socket.connect = record(socket.socket.connect)  # type: ignore[method-assign]
    socket.socket.connect_ex = record(socket.socket.connect_ex)  # type: ignore[method-assign]
    from vllm import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args([sys.argv[1], "--enforce-eager"])
    args.model = args.model_tag
    engine_args = AsyncEngineArgs.from_cli_args(args)
    config = engine_args.create_engine_config()
    from vllm.v1.metrics.loggers import load_stat_logger_plugin_factories

    print(
        json.dumps(
            {
                "parsed": repr(sorted(vars(args).items())),
                "engine_args": repr(engine_args),
                "config": re.sub(r"instance_id='[^']*'|0x[0-9a-f]+", "", repr(config)),
                "stat_loggers": [str(factory) for factory in load_stat_logger_plugin_factories()],
                "connections": connections,
                "ours": sorted(name for name in sys.modules if name.split(".")[0] == "vllm_pd"),
                "others": sorted(
                    name for name in sys.modules if name in ("redis", "aiohttp.web", "nixl", "nixl._api", "uvloop")
                ),
            }
        )
    )


if __name__ == "__main__":
    main()

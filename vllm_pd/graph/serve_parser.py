"""`python -m vllm_pd.graph.serve_parser`: what vLLM's own parser says of arguments of `vllm serve`.

A process of its own, because loading vLLM takes long and prints much. stdin: a JSON object of names and arguments;
stdout: `{"version": ..., "problems": {name: sentence}}`, without those that are understood.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from typing import NoReturn

from vllm_pd import layered

_UNKNOWN = "unrecognized arguments: "


class _Refused(Exception):
    """By the parser, with its message."""


def problems(commands: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """By name, what is wrong with its arguments (those after `vllm serve`), as the end of a sentence."""
    from vllm_pd.vllm_compat import FlexibleArgumentParser, ServeSubcommand

    parser = FlexibleArgumentParser(prog="vllm")
    serve = ServeSubcommand().subparser_init(parser.add_subparsers())

    def refuse(message: str) -> NoReturn:
        raise _Refused(message)

    parser.error = serve.error = refuse
    found = {}
    for name, args in commands.items():
        try:
            parser.parse_args(["serve", *args])
        except _Refused as e:
            found[name] = _told(str(e), serve, args)
        except (ValueError, TypeError, SystemExit) as e:
            found[name] = f"are refused: {e}"
    return found


def _told(message: str, serve: ArgumentParser, args: Sequence[str]) -> str:
    if not message.startswith(_UNKNOWN):
        return f"are refused: {message}"
    options = [option for option in serve._option_string_actions if option.startswith("--")]
    # What follows them is told too, and may be anything.
    unknown = [word for word in message.removeprefix(_UNKNOWN).splitlines()[0].split() if word in _flags(args)]
    named = [f"{flag}{layered.nearest(flag.partition('=')[0], options)}" for flag in unknown]
    return f"hold what is no option: {', '.join(named) or message.removeprefix(_UNKNOWN)}"


def _flags(args: Sequence[str]) -> set[str]:
    """As the parser repeats them: with dashes where there were underscores."""
    given = [arg for arg in args if arg.startswith("-")]
    return {*given, *(flag.replace("_", "-") + equals + value for flag, equals, value in map(_parts, given))}


def _parts(arg: str) -> tuple[str, str, str]:
    return arg.partition("=")


def main() -> None:
    # Whatever vLLM and its libraries print goes to stderr.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm_pd.vllm_compat.version import vllm_version

    with answer:
        json.dump({"version": vllm_version(), "problems": problems(json.load(sys.stdin))}, answer)


if __name__ == "__main__":
    main()

"""`vllm-pd planner`: run a planner, and see what planners decide and why."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from vllm_pd.console import Pool, add_action, for_each_pool, positive, print_table, with_pool_flags
from vllm_pd.layered import settings_of
from vllm_pd.planner.settings import PlannerSettings, read_settings
from vllm_pd.state.base import PoolId
from vllm_pd.state.open_registry import open_planner_board
from vllm_pd.state.planner_board import Leader, PlannerBoard

_EXAMPLES = """examples:
  # move workers between prefill and decode so that 95% of the requests meet both targets
  vllm-pd planner run --store redis://host:6379 --ttft 0.5 --itl 0.05

  # say what it would do, and do nothing; may run beside a planner that acts
  vllm-pd planner run --store redis://host:6379 --dry-run

  # also start and end workers, between 4 and 16, by a program of yours
  vllm-pd planner run --store redis://host:6379 --mode scale --min 4 --max 16 --actuator command=/opt/scale.sh

  vllm-pd planner explain --last 5         what it decided, why, and what came of it
  vllm-pd planner status                   who plans each pool, and its newest verdict

`vllm-pd planner` alone is `vllm-pd planner run`. Several planners may run for one cluster: one of them decides, the
others take over when it is gone. Order of settings: flag, environment (in brackets), file, default.

exit code: 0 fine, 1 no store, no worker or nothing planned yet, 2 a wrong setting"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "planner",
        help="decide who prefills, who decodes, and how many; show what was decided",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=_run)
    _add_settings(parser)
    actions = parser.add_subparsers(required=False, metavar="ACTION")
    run = add_action(actions, "run", _run, "plan until stopped", examples=_EXAMPLES)
    _add_settings(run)
    explained = "what was decided, why, and what came of it; newest last"
    explain = add_action(actions, "explain", _explain, explained, examples=_EXAMPLES)
    status = add_action(actions, "status", _status, "who plans each pool, and its newest verdict")
    for action in map(with_pool_flags, (explain, status)):
        action.add_argument("--dry-run", action="store_true", help="of planners that only try out")
        action.add_argument("--json", action="store_true", help="print JSON")
    explain.add_argument("--last", type=positive, default=1, metavar="N", help="so many steps (default 1)")
    explain.add_argument("--changes", action="store_true", help="only steps in which something was to be changed")


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """One flag for each field of `PlannerSettings`. Absent ones leave no trace, so they may stand before `run` too."""
    add = parser.add_argument
    add("--config", metavar="FILE", default=argparse.SUPPRESS, help="YAML file with any of these, or a section planner")
    defaults = PlannerSettings()
    for name, spec in settings_of(PlannerSettings).items():
        default = getattr(defaults, name)
        listed = isinstance(default, tuple)
        shown = "" if listed or default in ("", False) or spec.secret else f" (default: {default})"
        options: dict[str, Any] = {
            "dest": f"planner_{name}",
            "default": argparse.SUPPRESS,
            "help": f"{spec.help}{shown} [{spec.env}]".replace("%", "%%"),
        }
        if default is False:
            options["action"] = "store_true"
        elif listed:
            options.update(action="append", metavar="NAME=VALUE" if name == "options" else "NAME")
        else:
            options["metavar"] = name.upper()
        add(spec.flag, **options)


def _run(args: argparse.Namespace) -> int:
    flags = {
        name: getattr(args, f"planner_{name}")
        for name in settings_of(PlannerSettings)
        if hasattr(args, f"planner_{name}")
    }
    settings = read_settings(flags, getattr(args, "config", ""), os.environ)
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    asyncio.run(_serve(settings))
    return 0


async def _serve(settings: PlannerSettings) -> None:
    from vllm_pd.planner.page import PlannerPage, status_json
    from vllm_pd.planner.service import PlannerService

    service = PlannerService(settings)
    page = PlannerPage(service.metrics, lambda: status_json(service.id, settings.dry_run, service.statuses()))
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    try:
        if settings.metrics_port:
            await page.start(settings.metrics_host, settings.metrics_port)
        service.start()
        await stopping.wait()
    finally:
        await service.stop()
        await page.stop()


def _explain(args: argparse.Namespace) -> int:
    from vllm_pd.planner.journal import Step, as_dict, as_text, decode_steps

    async def read(board: PlannerBoard, pool: Pool) -> list[Step]:
        # Those that say nothing new are not in the journal, but the newest step is always there.
        limit = args.last if not args.changes else _LOOKED_AT
        steps = decode_steps(await board.journal(pool.id, limit))
        newest = decode_steps([await board.newest(pool.id)])
        if newest and (not steps or newest[0].at_s != steps[-1].at_s):
            steps += newest
        wanted = [step for step in steps if step.done or not args.changes]
        return wanted[-args.last :]

    found = for_each_pool(args, _opened(args), read, more=_planned)
    if not found:
        return 1
    steps = [step for _, of_pool in found for step in of_pool]
    if args.json:
        print(json.dumps([as_dict(step) for step in steps]))
    elif not steps:
        print("No planner has decided anything yet.")
    else:
        shown = []
        for pool, of_pool in found:
            shown += [as_text(step) for step in of_pool]
            if of_pool and not pool.workers:
                shown.append(f"No worker of pool {pool.id} is registered now; nothing is decided until one is.")
        print("\n\n".join(shown))
    return 0 if steps else 1


async def _planned(board: PlannerBoard) -> Sequence[PoolId]:
    """Pools of which no worker is left have a journal still."""
    return await board.pools()


_LOOKED_AT = 5000


def _status(args: argparse.Namespace) -> int:
    from vllm_pd.planner.journal import Step, decode_steps, iso_time

    async def read(board: PlannerBoard, pool: Pool) -> tuple[Leader | None, Step | None]:
        newest = decode_steps([await board.newest(pool.id)])
        return await board.leader(pool.id), newest[0] if newest else None

    found = for_each_pool(args, _opened(args), read, more=_planned)
    if not found:
        return 1
    if args.json:
        print(
            json.dumps(
                [
                    {
                        "pool": pool.id,
                        "model": pool.model,
                        "planner": leader.planner if leader else None,
                        "term": leader.term if leader else None,
                        "lease_left_ms": leader.left_ms if leader else None,
                        "at_s": step.at_s if step else None,
                        "kind": step.kind if step else None,
                        "verdict": step.verdict if step else None,
                    }
                    for pool, (leader, step) in found
                ]
            )
        )
    else:
        print_table(
            ("pool", "model", "planner", "at", "verdict"),
            [
                (
                    pool.id,
                    pool.model or "(no worker)",
                    leader.planner if leader else "(nobody)",
                    iso_time(step.at_s) if step else "-",
                    step.verdict if step else "-",
                )
                for pool, (leader, step) in found
            ],
        )
    return 0 if all(leader is not None for _, (leader, _) in found) else 1


def _opened(args: argparse.Namespace) -> Any:
    def opened(url: str, namespace: str, *, timeout_s: float) -> PlannerBoard:
        return open_planner_board(url, namespace, timeout_s=timeout_s, dry=args.dry_run)

    return opened

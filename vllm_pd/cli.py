"""`vllm-pd`: tools for a cluster and what decides in it."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from vllm_pd import __version__, explain_cli, queue_cli, role_cli, serve_flags, store_cli, tiers_cli
from vllm_pd.console import add_store_flags, print_table, store_settings
from vllm_pd.errors import PDError
from vllm_pd.graph import cli as graph_cli
from vllm_pd.planner import cli as planner_cli
from vllm_pd.settings import load_worker_settings
from vllm_pd.sim import cli as sim_cli
from vllm_pd.sim import mock_cli

EXAMPLES = """examples:
  vllm-pd up configs/disagg_router.yaml               a whole cluster on this machine; status, logs, scale, down
  vllm-pd config --role prefill --pd-cpu-gib 8        what that worker would run with, and where each value comes from
  VLLM_PD_STORE=redis://host:6379 vllm-pd workers     who is registered, in what role and with what load
  curl ROUTER/v1/explain -d @body.json > why.json     where that request would go;
  vllm-pd explain why.json --policy all               the same with reasons, and where other policies would send it
  vllm-pd simulate TRACE --workers 4,8                how a policy and a number of workers would do
  vllm-pd mock-worker --count 4 --store URL           workers without a model, for tests and load
  vllm-pd store check                                 whether the index of KV blocks is what the workers say they hold
  vllm-pd queue ls                                    what waits for prefill, and who has what
  vllm-pd role WORKER prefill --wait                  have a worker do something else, without a restart
  vllm-pd planner run --store URL --dry-run           what a planner would change; explain tells why
  vllm-pd tiers size --trace TRACE                    how much host memory and SSD this traffic is worth
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code (0 fine, 1 no store or no worker, 2 a wrong setting)."""
    args = _parser().parse_args(argv)
    try:
        status = int(args.run(args))
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Whoever read it, `head` say, has had enough; what Python still holds back must not raise once again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except PDError as e:
        print(f"vllm-pd: error: {e}", file=sys.stderr)
        return 2 if isinstance(e, ValueError) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-pd",
        description="Tools for a cluster of vLLM workers with the pd connector.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"vllm-pd {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    config = commands.add_parser("config", help="show the settings of a worker and where each comes from")
    serve_flags.add_flags(config)
    config.add_argument("--json", action="store_true", help="print one JSON object")
    config.set_defaults(run=_config)

    workers = commands.add_parser("workers", help="list the workers registered in the store")
    add_store_flags(workers)
    workers.add_argument("--json", action="store_true", help="print one JSON array")
    workers.set_defaults(run=_workers)

    graph_cli.add_parsers(commands)
    store_cli.add_parser(commands)
    queue_cli.add_parser(commands)
    role_cli.add_parser(commands)
    planner_cli.add_parser(commands)
    explain_cli.add_parser(commands)
    tiers_cli.add_parser(commands)
    sim_cli.add_parser(commands)
    mock_cli.add_parser(commands)
    return parser


def _config(args: argparse.Namespace) -> int:
    request = serve_flags.read_request(args)
    resolved = load_worker_settings(
        flags=request.flags, environ=request.environ, file=request.file, file_name=request.file_name
    )
    rows = [
        ("kv_connector", request.connector or "(none: vllm-pd is off)", request.connector_source),
        *resolved.describe(),
    ]
    if args.json:
        print(json.dumps({name: {"value": value, "source": source} for name, value, source in rows}))
        return 0
    print_table(("setting", "value", "from"), rows)
    return 0


def _workers(args: argparse.Namespace) -> int:
    from vllm_pd.state import open_registry

    settings = store_settings(args)

    async def read() -> Any:
        registry = open_registry(settings.store, settings.namespace)
        try:
            return await registry.snapshot()
        finally:
            await registry.close()

    snapshot = asyncio.run(read())
    if args.json:
        print(
            json.dumps(
                [
                    {
                        "id": w.record.id,
                        "url": w.record.url,
                        "role": str(w.record.role),
                        "moving_to": w.record.moving_to,
                        "models": list(w.record.models),
                        "pool": w.record.pool.id,
                        "epoch": w.record.epoch,
                        "lease_left_ms": w.lease_left_ms,
                        "running": w.running,
                        "waiting": w.waiting,
                        "kv_usage": round(w.kv_usage, 4),
                    }
                    for w in snapshot.workers
                ]
            )
        )
        return 0 if snapshot.workers else 1
    print_table(
        ("worker", "role", "url", "models", "running", "waiting", "KV used", "lease left"),
        [
            (
                w.record.id,
                f"{w.record.role}, drains to {w.record.moving_to}" if w.record.moving_to else str(w.record.role),
                w.record.url,
                ",".join(w.record.models),
                str(w.running),
                str(w.waiting),
                f"{w.kv_usage:.0%}",
                f"{w.lease_left_ms / 1000:.1f} s",
            )
            for w in snapshot.workers
        ],
    )
    if not snapshot.workers:
        print(f"No worker is registered in namespace {settings.namespace!r}.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`vllm-pd role`: what a worker does and how far a change of it is; and asking for a change."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
from typing import Any

from vllm_pd import roles as moves
from vllm_pd.console import add_store_flags, print_table, store_settings
from vllm_pd.layered import nearest
from vllm_pd.roles import Asked, Moved, Verdict
from vllm_pd.state.base import MoveState, Registry, Role, RoleMove, WorkerRecord
from vllm_pd.state.open_registry import open_registry, open_roles
from vllm_pd.state.roles import Roles

_EXAMPLES = """examples:
  vllm-pd role --store redis://host:6379          the role of every worker, and who asked for it
  vllm-pd role 10.0.0.7:8000 prefill --wait       have it drain and then prefill; returns when it does, or why not
  vllm-pd role 10.0.0.7:8000 decode --timeout 120 a move that takes longer than that is undone
  vllm-pd role 10.0.0.7:8000 auto                 planners, which leave alone what was moved by hand, may move it again

A move that is under way ends at once when the worker is asked for the role that it had before. A restarted worker has
the role of its --role again.

exit code: 0 fine, 1 no store, no such worker, refused or (with --wait) not done, 2 a wrong setting"""
_TIMEOUT_S = 5.0
_AUTO = "auto"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "role",
        help="show what workers do, or have one do something else without a restart",
        description="Show the roles of workers, or change one: the worker drains, then goes on warm in its new role.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("worker", nargs="?", metavar="WORKER", help="its id (host:port) or URL; default: show all")
    parser.add_argument("to", nargs="?", metavar="ROLE", type=_role, help="prefill, decode, both or auto")
    add_store_flags(parser)
    parser.add_argument("--wait", action="store_true", help="wait for the end of the move")
    parser.add_argument(
        "--timeout",
        type=float,
        default=moves.DEFAULT_TIMEOUT_S,
        metavar="S",
        help=f"seconds after which a move that has not finished is undone (default {moves.DEFAULT_TIMEOUT_S:g})",
    )
    parser.add_argument(
        "--force", action="store_true", help="also if nobody who prefills, or decodes, is left in its pool"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def _role(text: str) -> str:
    known = [*(str(role) for role in Role), _AUTO]
    if text not in known:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(known)}{nearest(text, known)}")
    return text


def _run(args: argparse.Namespace) -> int:
    settings = store_settings(args)

    async def run() -> int:
        registry = open_registry(settings.store, settings.namespace, timeout_s=_TIMEOUT_S)
        roles = open_roles(settings.store, settings.namespace, timeout_s=_TIMEOUT_S)
        try:
            if args.to is None:
                return await _show(args, registry)
            return await _move(args, registry, roles)
        finally:
            await registry.close()
            await roles.close()

    try:
        return asyncio.run(run())
    except KeyboardInterrupt:
        print("\nNot waiting any more; the worker goes on with what it was asked for.", file=sys.stderr)
        return 1


async def _show(args: argparse.Namespace, registry: Registry) -> int:
    records = [state.record for state in (await registry.snapshot()).workers]
    if args.worker is not None:
        wanted = args.worker.rstrip("/")
        known = [str(record.id) for record in records]
        records = [record for record in records if wanted in (record.id, record.url)]
        if not records:
            print(f"No worker {args.worker!r} is registered{nearest(args.worker, known)}.", file=sys.stderr)
            return 1
    if args.json:
        print(json.dumps([_record_json(record) for record in records]))
    else:
        rows = [(record.id, record.pool.id, str(record.role), *_move_cells(record)) for record in records]
        print_table(("worker", "pool", "role", "asked for by", "newest change"), rows)
        if not records:
            print("No worker is registered.", file=sys.stderr)
    return 0 if records else 1


async def _move(args: argparse.Namespace, registry: Registry, roles: Roles) -> int:
    role = None if args.to == _AUTO else Role(args.to)
    asked = await moves.request_move(registry, roles, args.worker, role, timeout_s=args.timeout, force=args.force)
    moved: Moved | None = None
    if asked.ok and args.wait and asked.wish is not None and asked.record is not None:
        if not args.json:
            print(asked.detail, flush=True)
        moved = await moves.wait_for_move(registry, asked.record, asked.wish)
    if args.json:
        print(json.dumps(_asked_json(asked, moved)))
    else:
        ok = asked.ok and (moved is None or moved.done)
        how = ". Use --force to do it all the same." if asked.verdict is Verdict.LAST else ""
        detail = moved.detail if moved is not None else asked.detail
        print(detail.rstrip(".") + how if how else detail, file=sys.stdout if ok else sys.stderr)
    return 0 if asked.ok and (moved is None or moved.done) else 1


def _move_cells(record: WorkerRecord) -> tuple[str, str]:
    move = record.move
    if move is None:
        return "-", "-"
    by = (move.by or "-") + (" (held)" if moves.is_held(record) else "")
    if move.state is MoveState.DRAINING:
        return by, f"drains to be {move.to}" + (f": {move.detail}" if move.detail else "")
    if move.state is MoveState.UNDONE:
        return by, f"not {move.to}: {move.detail}"
    return by, f"{move.to} after {move.took_ms / 1000:.1f} s"


def _record_json(record: WorkerRecord) -> dict[str, Any]:
    return {
        "worker": record.id,
        "url": record.url,
        "pool": record.pool.id,
        "epoch": record.epoch,
        "role": record.role,
        "role_epoch": record.role_epoch,
        "moving_to": record.moving_to,
        "held": moves.is_held(record),
        "move": _move_json(record.move),
    }


def _move_json(move: RoleMove | None) -> dict[str, Any] | None:
    return dataclasses.asdict(move) if move is not None else None


def _asked_json(asked: Asked, moved: Moved | None) -> dict[str, Any]:
    record, wish = asked.record, asked.wish
    return {
        "verdict": asked.verdict,
        "detail": moved.detail if moved is not None else asked.detail,
        "worker": record.id if record is not None else None,
        "wish": wish.id if wish is not None else None,
        "done": moved.done if moved is not None else None,
        "move": _move_json(moved.move if moved is not None else None),
    }

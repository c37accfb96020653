"""`vllm-pd queue`: what waits for prefill, who has what, what nobody could do; and taking a job out."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from vllm_pd.console import Pool, add_action, add_group, for_each_pool, print_table, with_pool_flags
from vllm_pd.state.base import WorkerId
from vllm_pd.state.open_registry import open_prefill_queue
from vllm_pd.state.prefill_payload import decode_request
from vllm_pd.state.prefill_queue import DeadJob, JobId, JobInfo, PrefillQueue, QueueDepth

_EXAMPLES = """examples:
  vllm-pd queue ls --store redis://host:6379   streams with their depth, and the oldest jobs of each
  vllm-pd queue peek JOB                       one job: who waits for it, who has it, how large it is
  vllm-pd queue cancel JOB                     forget it; its router has the prompt computed elsewhere
  vllm-pd queue dead                           jobs that failed on every worker that tried, and why

exit code: 0 fine, 1 no store, no worker or no such job, 2 a wrong setting"""
_SHARED = "(shared)"
_CANCELLED = "cancelled with vllm-pd queue cancel"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    actions = add_group(commands, "queue", "show the prefill queue, or take a job out of it", _EXAMPLES)
    for name, run, text in (
        ("ls", _ls, "streams with what waits and what is claimed, and the oldest jobs of each"),
        ("peek", _peek, "one job; without what the user wrote"),
        ("cancel", _cancel, "forget a job; the worker that has it stops"),
        ("dead", _dead, "the newest jobs that were given up, with the error of the last attempt"),
    ):
        action = with_pool_flags(add_action(actions, name, run, text))
        action.add_argument("--json", action="store_true", help="print JSON")
        if name in ("ls", "dead"):
            action.add_argument("--limit", type=_count, default=100, help="at most so many jobs (default 100)")
        else:
            action.add_argument("job", metavar="JOB", help="id of the job, as `vllm-pd queue ls` shows it")
        if name == "peek":
            action.add_argument(
                "--show-prompt", action="store_true", help="print the body and headers too, which hold what users wrote"
            )


def _ls(args: argparse.Namespace) -> int:
    async def look(queue: PrefillQueue, pool: Pool) -> tuple[dict[WorkerId | None, QueueDepth], Sequence[JobInfo]]:
        workers = {state.record.id for state in pool.workers if state.record.role.prefills}
        owners = sorted(workers.union(await queue.streams(pool.id)))
        return dict(await queue.depth(pool.id, owners)), await queue.jobs(pool.id, args.limit)

    found = for_each_pool(args, open_prefill_queue, look)
    if args.json:
        print(json.dumps([_ls_json(pool, depths, jobs) for pool, (depths, jobs) in found]))
        return 0 if found else 1
    for pool, (depths, jobs) in found:
        print(f"pool {pool.id} {pool.model}")
        print_table(
            ("stream", "waiting", "tokens", "claimed", "tokens"),
            [
                (
                    stream or _SHARED,
                    *map(str, (depth.waiting, depth.waiting_tokens, depth.claimed, depth.claimed_tokens)),
                )
                for stream, depth in depths.items()
            ],
            figures=True,
        )
        if jobs:
            print()
            print_table(
                ("job", "stream", "tokens", "order", "age", "ends in", "attempt", "claimed by"),
                [
                    (
                        job.id,
                        job.worker or _SHARED,
                        str(job.tokens),
                        str(job.order),
                        _seconds(job.age_ms),
                        _seconds(job.left_ms),
                        str(job.attempt),
                        job.claimant or "-",
                    )
                    for job in jobs
                ],
            )
    return 0 if found else 1


def _peek(args: argparse.Namespace) -> int:
    found = [
        (pool, *peeked)
        for pool, peeked in for_each_pool(
            args, open_prefill_queue, lambda queue, pool: queue.peek(pool.id, JobId(args.job))
        )
        if peeked is not None
    ]
    if not found:
        return _no_such_job(args.job)
    pool, job, payload = found[0]
    shown = {"pool": pool.id, "model": pool.model, **_job_json(job), **_payload_json(payload, args.show_prompt)}
    if args.json:
        print(json.dumps(shown))
        return 0
    print_table(("field", "value"), [(name, _text(value)) for name, value in shown.items()])
    return 0


def _cancel(args: argparse.Namespace) -> int:
    async def cancel(queue: PrefillQueue, pool: Pool) -> str | None:
        peeked = await queue.peek(pool.id, JobId(args.job))
        # Only what was seen: a cancel leaves a mark, also where the job never was.
        if peeked is None or not await queue.cancel(pool.id, JobId(args.job), _CANCELLED):
            return None
        return peeked[0].claimant

    found = [
        (pool, claimant) for pool, claimant in for_each_pool(args, open_prefill_queue, cancel) if claimant is not None
    ]
    if not found:
        return _no_such_job(args.job)
    pool, claimant = found[0]
    if args.json:
        print(json.dumps({"pool": pool.id, "job": args.job, "claimant": claimant}))
    else:
        print(f"Cancelled {args.job}" + (f"; {claimant} had it and is told to stop." if claimant else "."))
    return 0


def _dead(args: argparse.Namespace) -> int:
    async def dead(queue: PrefillQueue, pool: Pool) -> Sequence[DeadJob]:
        return await queue.dead(pool.id, args.limit)

    found = for_each_pool(args, open_prefill_queue, dead)
    jobs = [(pool, job) for pool, jobs in found for job in jobs]
    if args.json:
        print(json.dumps([{"pool": pool.id, **dataclasses.asdict(job)} for pool, job in jobs]))
    else:
        print_table(
            ("job", "pool", "tokens", "attempts", "error"),
            [(job.id, pool.id, str(job.tokens), str(job.attempts), job.error) for pool, job in jobs],
        )
    return 0 if found else 1


def _no_such_job(job: str) -> int:
    print(f"No job {job!r} is in the queue; it has ended, was cancelled or was too late.", file=sys.stderr)
    return 1


def _ls_json(pool: Pool, depths: dict[WorkerId | None, QueueDepth], jobs: Sequence[JobInfo]) -> dict[str, Any]:
    return {
        "pool": pool.id,
        "model": pool.model,
        "streams": [{"worker": worker, **dataclasses.asdict(depth)} for worker, depth in depths.items()],
        "jobs": [_job_json(job) for job in jobs],
    }


def _job_json(job: JobInfo) -> dict[str, Any]:
    fields = dataclasses.asdict(job)
    return {"job": fields.pop("id"), **fields}


def _payload_json(payload: bytes, show_prompt: bool) -> dict[str, Any]:
    """What a payload says. What users wrote is only counted, unless it is asked for."""
    shown: dict[str, Any] = {"payload_bytes": len(payload)}
    try:
        request = decode_request(payload)
    except ValueError:
        return {**shown, "unreadable": "another version made it"}
    shown |= {
        "path": request.path,
        "body_bytes": len(request.body),
        "header_names": [name for name, _ in request.headers],
        "deadline_in_ms": request.deadline_ms - round(time.time() * 1000),
        "timeout_ms": request.timeout_ms,
    }
    if show_prompt:
        shown |= {"headers": dict(request.headers), "body": request.body.decode(errors="replace")}
    return shown


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else json.dumps(value)


def _seconds(ms: int) -> str:
    return f"{ms / 1000:.1f} s"


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 1 <= value <= 10_000:
        raise argparse.ArgumentTypeError("must be a whole number from 1 to 10000")
    return value

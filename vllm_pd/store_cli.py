"""`vllm-pd store`: what the block index in the store holds, whether it is right, and how to empty it."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from vllm_pd.console import Pool, add_action, add_group, for_each_pool, print_table, with_pool_flags
from vllm_pd.errors import SettingsError
from vllm_pd.state.block_index import IndexStats, Tier
from vllm_pd.state.index_check import CacheCheck, Verdict, check_pool
from vllm_pd.state.open_registry import open_block_index

_EXAMPLES = """examples:
  vllm-pd store stats --store redis://host:6379    which worker holds how many blocks on which tier, and what it costs
  vllm-pd store check                              whether the index is what the workers say they hold
  vllm-pd store clear --yes                        forget all blocks; the workers announce theirs again within seconds

exit code: 0 fine, 1 no store, no worker, or the index is not right, 2 a wrong setting"""
_TIERS = (Tier.GPU, Tier.CPU, Tier.SSD)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    actions = add_group(commands, "store", "show, verify or empty the block index in the store", _EXAMPLES)
    for name, run, text in (
        ("stats", _stats, "caches, blocks by tier, memory and the event stream"),
        ("check", _check, "compare the index with what the live workers say they hold"),
        ("clear", _clear, "remove all blocks and events; workers announce theirs again"),
    ):
        action = with_pool_flags(add_action(actions, name, run, text))
        if name == "clear":
            action.add_argument("--yes", action="store_true", help="really do it")
        else:
            action.add_argument("--json", action="store_true", help="print one JSON array")


def _stats(args: argparse.Namespace) -> int:
    found = for_each_pool(args, open_block_index, lambda index, pool: index.stats(pool.id))
    if args.json:
        print(json.dumps([_stats_json(pool, stats) for pool, stats in found]))
        return 0 if found else 1
    for pool, stats in found:
        memory = sum(cache.memory_bytes for cache in stats.caches)
        print(
            f"pool {pool.id} {pool.model}: {len(pool.workers)} live workers, {len(stats.caches)} caches, "
            f"{sum(cache.distinct for cache in stats.caches)} blocks in {_mib(memory)}; "
            f"{stats.stream_entries} events in {_mib(stats.stream_bytes)}"
        )
        live = {(worker.record.id, worker.record.epoch) for worker in pool.workers}
        print_table(
            ("worker", "rank", "live", "GPU", "CPU", "SSD", "blocks", "bytes/block", "changes"),
            [
                (
                    cache.holder.worker,
                    str(cache.holder.rank),
                    "yes" if (cache.holder.worker, cache.epoch) in live else "no",
                    *(str(cache.blocks.get(tier, 0)) for tier in _TIERS),
                    str(cache.distinct),
                    f"{cache.memory_bytes / cache.distinct:.1f}" if cache.distinct and cache.memory_bytes else "-",
                    str(cache.seq),
                )
                for cache in stats.caches
            ],
        )
    return 0 if found else 1


def _check(args: argparse.Namespace) -> int:
    found = for_each_pool(args, open_block_index, lambda index, pool: check_pool(index, pool.id, pool.workers))
    checks = [(pool, check) for pool, checks in found for check in checks]
    right = bool(checks) and all(check.verdict in (Verdict.EQUAL, Verdict.ORPHAN) for _, check in checks)
    if args.json:
        print(json.dumps([_check_json(pool, check) for pool, check in checks]))
        return 0 if right else 1
    print_table(
        ("pool", "worker", "rank", "verdict", "GPU stated/found", "CPU", "SSD", "at change"),
        [
            (
                pool.id,
                check.holder.worker,
                str(check.holder.rank),
                str(check.verdict),
                *("/".join(map(str, check.blocks(tier))) for tier in _TIERS),
                str(check.seq),
            )
            for pool, check in checks
        ],
    )
    verdicts = {check.verdict for _, check in checks}
    if Verdict.DIFFERS in verdicts:
        print("The index is wrong; `vllm-pd store clear --yes` makes the workers announce anew.", file=sys.stderr)
    if Verdict.ABSENT in verdicts:
        print(
            "A live worker has no cache in the index; its KV events are off or it cannot write, see its log.",
            file=sys.stderr,
        )
    return 0 if right else 1


def _clear(args: argparse.Namespace) -> int:
    if not args.yes:
        raise SettingsError("Clearing makes routers forget who holds what for some seconds; add --yes to do it.")
    found = for_each_pool(args, open_block_index, lambda index, pool: index.clear(pool.id))
    for pool, keys in found:
        print(f"pool {pool.id} {pool.model}: removed {keys} keys")
    return 0 if found else 1


def _stats_json(pool: Pool, stats: IndexStats) -> dict[str, Any]:
    return {
        "pool": pool.id,
        "model": pool.model,
        "workers": [worker.record.id for worker in pool.workers],
        "stream": {"entries": stats.stream_entries, "bytes": stats.stream_bytes},
        "caches": [
            {
                "worker": cache.holder.worker,
                "rank": cache.holder.rank,
                "epoch": cache.epoch,
                "seq": cache.seq,
                "blocks": {str(tier.name).lower(): cache.blocks.get(tier, 0) for tier in _TIERS},
                "distinct": cache.distinct,
                "keys": cache.keys,
                "bytes": cache.memory_bytes,
            }
            for cache in stats.caches
        ],
    }


def _check_json(pool: Pool, check: CacheCheck) -> dict[str, Any]:
    return {
        "pool": pool.id,
        "worker": check.holder.worker,
        "rank": check.holder.rank,
        "epoch": check.epoch,
        "verdict": str(check.verdict),
        "seq": check.seq,
        "stated": {str(tier.name).lower(): check.blocks(tier)[0] for tier in _TIERS},
        "found": {str(tier.name).lower(): check.blocks(tier)[1] for tier in _TIERS},
    }


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB" if size else "an unknown number of bytes"

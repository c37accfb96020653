"""`vllm-pd explain FILE`: a decision of a router, made again from its record, also by other policies."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from vllm_pd.console import print_table
from vllm_pd.errors import SettingsError
from vllm_pd.routing import policies
from vllm_pd.routing.record import DecisionRecord, Outcome, PoolRecord, ScoredRecord, read_record, repeat
from vllm_pd.routing.split_rule import Disagg, split_rule
from vllm_pd.state.block_index import Holder


def add_parser(commands: Any) -> None:
    """Add the command to those of `vllm-pd`."""
    parser = commands.add_parser(
        "explain",
        help="show a router's decision, and what other policies would have done",
        description="Save the answer of POST /v1/explain to FILE (- reads standard input). Nothing is asked again: "
        "the record holds what the router saw. Ends with 1 when the decision does not come out the same.",
    )
    parser.add_argument("file", metavar="FILE", help="the record as JSON")
    parser.add_argument(
        "--policy",
        action="append",
        default=[],
        metavar="NAME",
        help=f"another policy to compare with, again for more: {', '.join(policies.POLICIES)}, or all",
    )
    parser.add_argument(
        "--disagg",
        action="append",
        default=[],
        metavar="NAME",
        help=f"another rule of when to split, again for more: {', '.join(Disagg)}, or all",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Returns 0 when the decision is reproduced, else 1.

    Raises:
        SettingsError: no such file, no record, an unknown policy or rule.
    """
    try:
        text = sys.stdin.buffer.read() if args.file == "-" else Path(args.file).read_bytes()
    except OSError as e:
        raise SettingsError(f"The file {args.file} cannot be read ({e.strerror or e}); name a saved record.") from None
    record = read_record(text)
    again = repeat(record)
    names = list(policies.POLICIES) if "all" in args.policy else args.policy
    others = {name: repeat(record, policies.policy(name)) for name in names}
    rules = list(Disagg) if "all" in args.disagg else args.disagg
    limit = record.rule.max_local_tokens
    splits = {
        str(name): repeat(record, rule=split_rule(name, limit or (0 if name == Disagg.THRESHOLD else None)))
        for name in rules
    }
    reproduced = again.same_as(record.outcome)
    if args.json:
        value = {
            "reproduced": reproduced,
            "policy": record.policy,
            "outcome": again,
            "policies": others,
            "rules": splits,
        }
        print(msgspec.json.encode(value).decode())
    else:
        _print(record, again, reproduced)
        _print_others("policy", others, record.outcome)
        _print_others("rule", splits, record.outcome)
    return 0 if reproduced else 1


def _print(record: DecisionRecord, again: Outcome, reproduced: bool) -> None:
    outcome = record.outcome
    print(f"{record.path} for {record.model or 'no model'}, request {record.request}")
    for pool in record.pools:
        print(_pool(pool))
    weights = ", ".join(f"{name} {value:g}" for name, value in record.weights)
    print(f"policy {record.policy}{f' ({weights})' if weights else ''}, temperature {record.temperature:g}")
    print()
    _print_scored("answers", again.decoders, outcome.decode)
    if again.prefillers:
        print()
        _print_scored("prefills", again.prefillers, outcome.prefill)
    print()
    to = f"prefill on {_name(outcome.prefill)}, answer from" if outcome.prefill is not None else "whole to"
    print(f"{to} {_name(outcome.decode)} ({outcome.choice}; {record.reason}), first token in {_ms(outcome.ttft)} ms")
    print(_rule(record))
    if reproduced:
        print("made again from the record: the same")
    else:
        print(f"made again from the record: {_name(again.decode)}; it was written by another version or changed")


def _print_others(what: str, others: Mapping[str, Outcome], outcome: Outcome) -> None:
    if not others:
        return
    print()
    print_table(
        (what, "answers", "prefills", "first token ms", "why", "same"),
        [
            (
                name,
                _name(other.decode),
                _name(other.prefill) if other.prefill is not None else "-",
                _ms(other.ttft),
                other.whole_or_split,
                "yes" if other.same_as(outcome) else "no",
            )
            for name, other in others.items()
        ],
    )


def _rule(record: DecisionRecord) -> str:
    rule, weighed = record.rule, record.outcome.weighed
    limit = f", at most {rule.max_local_tokens} tokens locally" if rule.max_local_tokens else ""
    text = f"rule {rule.name}{limit}"
    if weighed is None:
        return text
    return (
        f"{text}: everybody together waits {_ms(weighed.here)} ms if {_name(record.outcome.decode)} prefills itself, "
        f"{_ms(weighed.there)} ms if another does, {_ms(weighed.transfer)} ms of it for the hand-over"
    )


def _pool(pool: PoolRecord) -> str:
    ask = pool.ask
    known = f"{pool.blocks} whole blocks of {ask.block_size} looked up"
    if pool.why_unknown:
        known = f"an estimate; its blocks are not known: {pool.why_unknown}"
    age = f", index {_ms(pool.index_age)} ms old" if pool.index_age is not None else ", no index"
    return f"pool {pool.pool}: {ask.tokens} tokens, {known}{age}"


def _print_scored(title: str, scored: Sequence[ScoredRecord], chosen: Holder | None) -> None:
    rows = []
    for each in sorted(scored, key=lambda each: each.score):
        holder = Holder(each.worker, each.rank)
        parts = ", ".join(f"{name} {value:.6g}" for name, value in each.parts.items())
        rows.append(
            (
                ("> " if holder == chosen else "  ") + _name(holder),
                str(each.overlap.gpu),
                str(each.overlap.cpu),
                str(each.overlap.ssd),
                str(each.uncached),
                _ms(each.ttft),
                f"{each.score:.6g}",
                parts,
            )
        )
    head = (f"  {title}", "GPU", "CPU", "SSD", "to compute", "first token ms", "score", "made of")
    print_table(head, rows)


def _name(holder: Holder) -> str:
    return f"{holder.worker}/{holder.rank}" if holder.rank else holder.worker


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f}"

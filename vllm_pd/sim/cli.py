"""`vllm-pd simulate`: replay a trace against modelled workers under several routing policies."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_pd.console import add_output, natural, number_list, positive, print_table
from vllm_pd.errors import SettingsError
from vllm_pd.sim import planned_cli
from vllm_pd.sim.parallel import run_cells
from vllm_pd.tier_choices import DEFAULT_EVICTION, EVICTIONS

if TYPE_CHECKING:
    from vllm_pd.sim.cluster import ClusterConfig
    from vllm_pd.sim.report import Report
    from vllm_pd.sim.timing import TimingModel
    from vllm_pd.sim.trace import TraceRequest

_EXAMPLES = """examples:
  # how many workers does this traffic need, and at twice the traffic?
  vllm-pd simulate trace.jsonl --workers 4,8,16 --speed 1,2

  # every policy, with host memory and SSD behind the GPU cache, as a page to look at
  vllm-pd simulate trace.jsonl --policies all --cpu-blocks 8000 --ssd-blocks 50000 --html report.html

  # two prefill and two decode workers instead of four that do both
  vllm-pd simulate trace.jsonl --prefill 2 --decode 2

  # does splitting pay, and by which rule?
  vllm-pd simulate trace.jsonl --prefill 2 --decode 2 --disagg always,never,auto --policies predicted

  # with the speed of a worker that runs here and is idle; the model is kept in worker.json
  vllm-pd simulate trace.jsonl --fit http://localhost:8000 --save-timing worker.json

  # what does a planner make of it that moves workers between prefill and decode? one that starts and stops them?
  vllm-pd simulate trace.jsonl --prefill 8 --decode 8 --planner fixed --ttft-ms 2000 --itl-ms 20
  vllm-pd simulate trace.jsonl --prefill 8 --decode 8 --planner scale --min-workers 4 --cold-start 10,60,300

  # no trace at hand: 300 made-up conversations
  vllm-pd simulate --made-up 300

A trace has one JSON object a line: timestamp (ms), input_length, output_length, hash_ids (one number for each 512
tokens of the prompt; equal numbers mean equal content). Public ones: """

_EXIT_CODES = """
exit code: 0 done, 1 a request never ended or a worker cannot be measured, 2 a wrong setting"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command; what it needs is imported when it runs."""
    from vllm_pd.sim.trace import SOURCE

    parser = commands.add_parser(
        "simulate",
        help="replay a trace against modelled workers: compare routing policies, size a cluster",
        description="Replay a trace in virtual time against modelled workers, behind the router's own choice.",
        epilog=_EXAMPLES + SOURCE + _EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("trace", nargs="?", type=Path, metavar="TRACE", help="a trace in Mooncake's format")
    parser.add_argument("--made-up", type=positive, metavar="N", help="N made-up conversations instead of a trace")
    parser.add_argument("--limit", type=positive, metavar="N", help="only the first N requests")
    cells = parser.add_argument_group("what to compare (lists, separated by commas)")
    cells.add_argument(
        "--policies",
        default="predicted,round-robin,least-loaded,prefix",
        metavar="LIST",
        help="or `all`; default: %(default)s",
    )
    cells.add_argument("--workers", type=number_list(int), metavar="LIST", help="numbers of workers; default: 4")
    cells.add_argument(
        "--speed", type=number_list(float), default=[1.0], metavar="LIST", help="arrivals so many times as fast"
    )
    cells.add_argument("--prefill", type=int, default=0, metavar="N", help="prefill workers")
    cells.add_argument("--decode", type=int, default=0, metavar="N", help="decode workers")
    cells.add_argument(
        "--disagg",
        default="auto",
        metavar="LIST",
        help="when requests are split between them, as of vllm-pd-router; or `all`; default: %(default)s",
    )
    cells.add_argument(
        "--max-local-prefill-tokens", type=natural, metavar="N", help="of these rules, as of vllm-pd-router"
    )
    engine = parser.add_argument_group("workers")
    engine.add_argument(
        "--gpu-blocks", type=positive, default=2048, metavar="N", help="GPU cache; default: %(default)s"
    )
    engine.add_argument("--cpu-blocks", type=natural, default=0, metavar="N", help="host memory tier; default: none")
    engine.add_argument(
        "--eviction",
        choices=EVICTIONS,
        default=DEFAULT_EVICTION,
        metavar="POLICY",
        help=f"who evicts from host memory: {', '.join(EVICTIONS)}; default: %(default)s",
    )
    engine.add_argument("--ssd-blocks", type=natural, default=0, metavar="N", help="SSD tier; default: none")
    engine.add_argument("--block-size", type=positive, default=512, metavar="N", help="tokens; default: %(default)s")
    engine.add_argument(
        "--hash-tokens",
        type=positive,
        default=512,
        metavar="N",
        help="tokens that a hash id stands for; default: %(default)s",
    )
    engine.add_argument(
        "--max-num-batched-tokens",
        type=positive,
        default=8192,
        metavar="N",
        help="as of vllm serve; default: %(default)s",
    )
    engine.add_argument(
        "--max-num-seqs", type=positive, default=256, metavar="N", help="as of vllm serve; default: %(default)s"
    )
    engine.add_argument(
        "--scheduling-policy",
        choices=("priority", "fcfs"),
        default="priority",
        help="as of vllm serve; with fcfs the router cannot let short prompts go first; default: %(default)s",
    )
    engine.add_argument(
        "--timing", type=Path, metavar="FILE", help="JSON with seconds; default: the formula of Dynamo's mocker"
    )
    engine.add_argument(
        "--fit", metavar="URL|FILE", help="fit the timing to an idle worker, or to measured samples (JSON lines)"
    )
    engine.add_argument("--save-timing", type=Path, metavar="FILE", help="write the timing in use, for --timing")
    router = parser.add_argument_group("router")
    router.add_argument("--temperature", type=float, default=0.0, help="spread choices; default: %(default)s")
    router.add_argument("--seed", type=int, default=0, help="of all chance; default: %(default)s")
    router.add_argument(
        "--event-delay-ms",
        type=float,
        default=5.0,
        metavar="MS",
        help="from a cache change to the router; default: %(default)s",
    )
    planned_cli.add_arguments(parser)
    add_output(parser, "print one JSON array instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Do what the command line says; returns the exit code."""
    from vllm_pd.sim import page, plot
    from vllm_pd.sim.floor import floor
    from vllm_pd.sim.report import table

    if (args.plot or args.html) and not args.planner:
        page.require_plots()
    trace = _trace(args)
    configs = _cells(args)
    if args.save_timing:
        configs[0].timing.save(args.save_timing)
    if args.planner:
        return planned_cli.run(args, trace, configs)

    def told(done: int, report: Report) -> None:
        if not args.quiet:
            rule = f" {report.disagg}" if report.disagg else ""
            cell = f"{report.policy}, {report.cluster} workers{rule}, x{report.speed:g}"
            print(f"{done}/{len(configs)} {cell}: mean TTFT {report.ttft_mean:.0f} ms", file=sys.stderr, flush=True)

    reports = simulate(trace, configs, args.jobs, told)
    if args.json:
        print(json.dumps([report.as_dict() for report in reports]))
    else:
        head, *rows = table(reports)
        print_table(head, rows, figures=True)
        least = floor(trace, configs[0].timing, configs[0].engine)
        print(
            f"\nEvery request alone on a worker that holds all earlier prompts: TTFT mean {least.ttft_mean:.0f}, "
            f"p50 {least.ttft_p50:.0f}, p99 {least.ttft_p99:.0f} ms, hits {least.hits:.1%}. Times are in ms."
        )
    if args.plot or args.html:
        name = args.trace.name if args.trace else f"{args.made_up} made-up conversations"
        title = f"{name}, {len(trace)} requests"
        figure = plot.draw(reports, title)
        if args.plot:
            page.save_png(figure, args.plot)
        if args.html:
            plot.save_html(figure, reports, title, args.html)
    return 1 if any(report.unfinished for report in reports) else 0


def _trace(args: argparse.Namespace) -> list[TraceRequest]:
    from vllm_pd.sim.trace import make_trace, read_trace

    if (args.trace is None) == (args.made_up is None):
        raise SettingsError("Give either a trace or --made-up N.")
    if args.trace is not None:
        return read_trace(args.trace, limit=args.limit, block_size=args.block_size, hash_tokens=args.hash_tokens)
    made = make_trace(sessions=args.made_up, turns=6, seed=args.seed, block_size=args.block_size)
    return made[: args.limit]


def _timing(args: argparse.Namespace) -> TimingModel:
    from vllm_pd.sim.samples import measure, read_samples
    from vllm_pd.sim.timing import TimingModel, fit

    timing = TimingModel.load(args.timing) if args.timing else TimingModel()
    if not args.fit:
        return timing
    is_url = args.fit.startswith(("http://", "https://"))
    prefills, steps = measure(args.fit) if is_url else read_samples(Path(args.fit))
    return fit(prefills, steps, timing)


def _cells(args: argparse.Namespace) -> list[ClusterConfig]:
    from vllm_pd.routing import policies as routing
    from vllm_pd.routing.split_rule import Disagg, split_rule
    from vllm_pd.sim.cluster import ClusterConfig
    from vllm_pd.sim.work import EngineConfig

    policies = list(routing.POLICIES) if args.policies == "all" else [name.strip() for name in args.policies.split(",")]
    for name in policies:
        if name not in routing.POLICIES:
            raise SettingsError(f"There is no policy {name!r}; choose from {', '.join(routing.POLICIES)}.")
    if (args.prefill > 0) != (args.decode > 0) or min(args.prefill, args.decode) < 0:
        raise SettingsError("--prefill and --decode go together: a split request needs one of each.")
    split = args.prefill > 0
    engine = EngineConfig(
        gpu_blocks=args.gpu_blocks,
        block_size=args.block_size,
        cpu_blocks=args.cpu_blocks,
        ssd_blocks=args.ssd_blocks,
        eviction=args.eviction,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_num_seqs=args.max_num_seqs,
        scheduling_policy=args.scheduling_policy,
    )
    timing = _timing(args)
    names = list(Disagg) if args.disagg == "all" else args.disagg.split(",")
    if args.disagg == "all" and args.max_local_prefill_tokens is None:
        names.remove(Disagg.THRESHOLD)
    rules = [split_rule(name.strip(), args.max_local_prefill_tokens) for name in names]
    clusters = [(count, 0, 0) for count in args.workers or ([] if split else [4])]
    if split:
        clusters.append((0, args.prefill, args.decode))
    return [
        ClusterConfig(
            policy=policy,
            rule=rule,
            workers=workers,
            prefill=prefill,
            decode=decode,
            speed=speed,
            engine=engine,
            timing=timing,
            seed=args.seed,
            temperature=args.temperature,
            event_delay=args.event_delay_ms / 1000,
        )
        for workers, prefill, decode in clusters
        for speed in args.speed
        for policy in policies
        for rule in (rules if prefill else rules[:1])
    ]


def simulate(
    trace: Sequence[TraceRequest],
    configs: Sequence[ClusterConfig],
    jobs: int = 1,
    told: Callable[[int, Report], None] | None = None,
) -> list[Report]:
    """Run each configuration over the trace, in `jobs` processes; results in the order of the configurations.

    `told` hears of each that is done, with how many that makes.
    """
    return run_cells(_simulate_one, trace, configs, jobs, told)


def _simulate_one(trace: Sequence[TraceRequest], config: ClusterConfig) -> Report:
    from vllm_pd.sim.cluster import Cluster
    from vllm_pd.sim.report import summarize

    return summarize(Cluster(config).simulate(trace))

"""`vllm-pd mock-worker`: workers without a model, for tests and load."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import logging
import os
import resource
import signal
import sys
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_pd.errors import SettingsError

if TYPE_CHECKING:
    from vllm_pd.state.base import Role

_FILES_PER_WORKER = 40

_EXAMPLES = """examples:
  # two workers that do both, on ports 8000 and 8001, registered in a store
  vllm-pd mock-worker --count 2 --port 8000 --store redis://localhost:6379

  # 200 workers in turn prefill, decode, decode; ten times as fast as the modelled GPU
  vllm-pd mock-worker --count 200 --role prefill,decode,decode --speed 10 --store redis://localhost:6379

  # one that loses a tenth of its KV events and cuts every stream after 5 tokens
  vllm-pd mock-worker --fault drop-events=0.1 --fault cut-after=5

  # later, while it runs: three requests get 503, then all is well again; then it dies
  curl -X POST localhost:8000/mock/faults -d '{"status": 503, "times": 3}'
  curl -X POST localhost:8000/mock/faults -d '{"die": true}'

faults, as --fault NAME=VALUE and as JSON at /mock/faults (?worker=PORT for another one of this process):
  times=N            the faults of requests end after N requests
  status=CODE        requests get this status          delay=S            a request waits so long first
  hang               requests get no answer            stall-after=N      streams stop after N tokens
  cut-after=N        streams are cut after N tokens    unhealthy          /health answers 503
  wrong-prefill=HOW  missing, null, garbage or gone transfer parameters
  drop-events=PART   KV events that are not sent       drop-replays       nor kept for replay
  refuse=S           the port is closed for so long (JSON only)
  die                the worker ends at once, and withdraws nothing (JSON only)

exit code: 0 stopped by a signal, 1 the store or the network failed, 2 a wrong setting"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command; what it needs is imported when it runs."""
    parser = commands.add_parser(
        "mock-worker",
        help="serve the OpenAI API from modelled engines, with KV events and faults on demand",
        description="Workers without a model: the OpenAI API, KV events and P/D of vLLM, with modelled times.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on and to advertise; default: %(default)s"
    )
    parser.add_argument("--port", type=int, default=8000, help="of the first worker, 0 for any; default: %(default)s")
    parser.add_argument("--count", type=int, default=1, metavar="N", help="workers on consecutive ports; default: 1")
    parser.add_argument("--role", default="both", metavar="LIST", help="prefill, decode or both; a list is repeated")
    parser.add_argument(
        "--store",
        default=os.environ.get("VLLM_PD_STORE", ""),
        metavar="URL",
        help="where to register (or VLLM_PD_STORE)",
    )
    parser.add_argument(
        "--namespace",
        default=os.environ.get("VLLM_PD_NAMESPACE", "default"),
        help="in the store (or VLLM_PD_NAMESPACE)",
    )
    parser.add_argument(
        "--lease", type=float, metavar="S", help="seconds after which the store forgets a worker that is gone"
    )
    model = parser.add_argument_group("model")
    model.add_argument("--model", default="mock", metavar="NAME", help="default: %(default)s")
    model.add_argument(
        "--tokenizer", type=Path, metavar="PATH", help="a model's folder; default: a toy with one token a byte"
    )
    model.add_argument("--lora", action="append", default=[], metavar="NAME=PATH", help="an adapter it answers to")
    model.add_argument("--max-model-len", type=int, default=32_768, metavar="N", help="default: %(default)s")
    model.add_argument(
        "--output-tokens",
        type=int,
        default=64,
        metavar="N",
        help="of an answer that nothing limits; default: %(default)s",
    )
    engine = parser.add_argument_group("engine")
    engine.add_argument("--block-size", type=int, default=16, metavar="N", help="tokens; default: %(default)s")
    engine.add_argument("--gpu-blocks", type=int, default=8192, metavar="N", help="default: %(default)s")
    engine.add_argument("--cpu-blocks", type=int, default=0, metavar="N", help="host memory tier; default: none")
    engine.add_argument("--ssd-blocks", type=int, default=0, metavar="N", help="SSD tier; default: none")
    engine.add_argument("--max-num-batched-tokens", type=int, default=8192, metavar="N", help="default: %(default)s")
    engine.add_argument("--max-num-seqs", type=int, default=256, metavar="N", help="default: %(default)s")
    engine.add_argument("--timing", type=Path, metavar="FILE", help="JSON, as for `vllm-pd simulate`")
    engine.add_argument(
        "--speed", type=float, default=1.0, metavar="X", help="so many times as fast; default: %(default)s"
    )
    engine.add_argument("--no-kv-events", action="store_true", help="publish no KV events")
    engine.add_argument("--no-claims", action="store_true", help="take no jobs from the store's prefill queue")
    engine.add_argument(
        "--prefill-budget-tokens",
        type=int,
        default=0,
        metavar="N",
        help="of jobs claimed at a time; default: two batches",
    )
    engine.add_argument("--seed", type=int, default=0, help="of which events are dropped")
    parser.add_argument("--fault", action="append", default=[], metavar="NAME[=VALUE]", help="see below")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit code."""
    if importlib.util.find_spec("zmq") is None:
        raise SettingsError("Mock workers need pyzmq; install vllm-pd[mock].")
    import uvloop

    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    uvloop.run(_serve(args))
    return 0


async def _serve(args: argparse.Namespace) -> None:
    from vllm_pd.block_hash import Lora
    from vllm_pd.settings import DEFAULT_LEASE_S
    from vllm_pd.sim.mock_faults import faults_from_flags
    from vllm_pd.sim.mock_host import MockHost
    from vllm_pd.sim.mock_tokenizer import MockTokenizer
    from vllm_pd.sim.mock_worker import MockConfig
    from vllm_pd.sim.timing import TimingModel
    from vllm_pd.sim.work import EngineConfig

    for name in (
        "count",
        "block_size",
        "gpu_blocks",
        "max_num_batched_tokens",
        "max_num_seqs",
        "speed",
        "output_tokens",
    ):
        if getattr(args, name) <= 0:
            raise SettingsError(f"--{name.replace('_', '-')} must be above 0.")
    faults = faults_from_flags(args.fault)
    if faults.die or faults.refuse:
        raise SettingsError("A worker cannot begin with die or refuse; post it to /mock/faults when it runs.")
    config = MockConfig(
        model=args.model,
        loras=tuple(Lora(*_name_and_path(lora)) for lora in args.lora),
        engine=EngineConfig(
            gpu_blocks=args.gpu_blocks,
            block_size=args.block_size,
            cpu_blocks=args.cpu_blocks,
            ssd_blocks=args.ssd_blocks,
            max_num_batched_tokens=args.max_num_batched_tokens,
            max_num_seqs=args.max_num_seqs,
        ),
        timing=TimingModel.load(args.timing) if args.timing else TimingModel(),
        speed=args.speed,
        max_model_len=args.max_model_len,
        output_tokens=args.output_tokens,
        store=args.store,
        namespace=args.namespace,
        lease_s=args.lease or DEFAULT_LEASE_S,
        kv_events=not args.no_kv_events,
        claims=not args.no_claims,
        prefill_budget_tokens=max(0, args.prefill_budget_tokens),
        seed=args.seed,
    )
    _allow_files(args.count * _FILES_PER_WORKER)
    try:
        tokenizer = MockTokenizer(args.tokenizer)
    except ValueError as e:
        raise SettingsError(f"--tokenizer {args.tokenizer}: {e}") from None
    host = MockHost(config, _roles(args.role, args.count), tokenizer, host=args.host, port=args.port, faults=faults)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    try:
        await host.start()
        urls = [worker.url for worker in host.workers]
        print(f"ready: {urls[0]}" + (f" to {urls[-1]}" if len(urls) > 1 else ""), flush=True)
        await stopping.wait()
    finally:
        await host.stop()


def _roles(text: str, count: int) -> list[Role]:
    from vllm_pd.state.base import Role

    try:
        roles = [Role(name.strip()) for name in text.split(",")]
    except ValueError:
        raise SettingsError(f"--role {text!r} must be prefill, decode or both, or a list of these.") from None
    return list(islice(cycle(roles), count))


def _name_and_path(text: str) -> tuple[str, str]:
    name, separator, path = text.partition("=")
    if not (name and separator and path):
        raise SettingsError(f"--lora {text!r} must be NAME=PATH.")
    return name, path


def _allow_files(count: int) -> None:
    """Raise this process's limit of open files as far as it takes and is allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(soft, 1024 + count)
    if hard != resource.RLIM_INFINITY and wanted > hard:
        print(f"Only {hard} open files are allowed; {wanted} may be needed (ulimit -n).", file=sys.stderr)
        wanted = hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

"""Twenty minutes at 80% of capacity on eight mock workers while things fail at random.

    python -m benchmarks.soak [--json] [--quick]        # quick: two minutes

Capacity is measured first, without faults. Then requests arrive at random times, whether earlier ones are answered or
not. Shown: how many were answered in full and with the right text, the slowest, and the router's memory and open
descriptors, which must stay flat.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp

from benchmarks.common import Report, Target, parse_arguments, percentile, progress
from benchmarks.soak_cluster import SoakCluster
from benchmarks.soak_faults import RandomFaults
from vllm_pd.sim.mock_tokenizer import MockTokenizer

SECONDS, QUICK_SECONDS = 1200.0, 120.0
CAPACITY_S = 10.0
CAPACITY_CLIENTS = 64
PART = 0.8
SPEED = 0.5
SEQUENCES = 8
FAULT_EVERY_S = 5.0
DEADLINE_S = 60.0
SAMPLE_EVERY_S = 2.0
SETTLE_S = 20.0
"""After the last answer: connections that are not used any more are closed by then."""
MIN_SUCCESS = 0.999
MAX_MORE_MIB = 16.0
MAX_MORE_FILES = 32.0
_PREFIXES = 24
_SEED = 7


@dataclass(slots=True)
class Outcomes:
    """What became of the requests: seconds of those answered in full, and why the others were not."""

    took: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return len(self.took) + self.failed.total()


@dataclass(slots=True)
class Samples:
    """The router's process, over time."""

    at: list[float] = field(default_factory=list)
    mib: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)
    """MiB without what it says its caches of prompts have: those have a limit and grow towards it for minutes."""
    files: list[float] = field(default_factory=list)

    @staticmethod
    def growth(values: Sequence[float]) -> float:
        """From the third quarter to the last: by then caches and pools have their size, in a run of full length."""
        quarter = max(1, len(values) // 4)
        return statistics.median(values[-quarter:]) - statistics.median(values[-2 * quarter : -quarter] or values)


class Asker:
    """Sends requests whose answers are known."""

    def __init__(self, url: str, session: aiohttp.ClientSession, seed: int) -> None:
        self._url = url
        self._session = session
        self._chance = random.Random(seed)
        self._story = MockTokenizer(None)
        self._prefixes = [self._words(self._chance.randint(200, 1500)) for _ in range(_PREFIXES)]

    def _words(self, characters: int) -> str:
        return "".join(self._chance.choices("abcdefgh ", k=characters))

    async def ask(self, outcomes: Outcomes) -> None:
        """One request, written down in `outcomes`. Never raises but for its cancellation."""
        chance = self._chance
        tokens = chance.choice((8, 16, 32, 64))
        prompt = chance.choice(self._prefixes) + self._words(chance.randint(20, 600))
        stream = chance.random() < 0.7
        body = {"model": "mock", "prompt": prompt, "max_tokens": tokens, "stream": stream, "temperature": 0}
        started = time.monotonic()
        try:
            async with asyncio.timeout(DEADLINE_S):
                async with self._session.post(f"{self._url}/v1/completions", json=body) as answer:
                    text, first, problem = await _read(answer)
        except TimeoutError:
            outcomes.failed[f"no end within {DEADLINE_S:.0f} s"] += 1
            return
        except (aiohttp.ClientError, OSError, ValueError) as e:
            outcomes.failed[f"{type(e).__name__}: {e}"[:120]] += 1
            return
        if problem:
            outcomes.failed[_plain(problem)] += 1
        elif text != self._story.answer_text(0, tokens):
            outcomes.failed["wrong answer"] += 1
        else:
            outcomes.took.append(time.monotonic() - started)
            outcomes.first.append((first or time.monotonic()) - started)


async def _read(answer: aiohttp.ClientResponse) -> tuple[str, float, str]:
    """Text, monotonic seconds of the first piece, and what went wrong."""
    if answer.status != 200:
        return "", 0.0, f"{answer.status}: {_message(await answer.read())}"
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return json.loads(await answer.read())["choices"][0]["text"], 0.0, ""
    text, first, is_done = "", 0.0, False
    async for line in answer.content:
        data = line.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            is_done = True
        elif data.startswith(b"{"):
            event = json.loads(data)
            if "error" in event:
                return text, first, f"error event: {_message(data)}"
            text += "".join(choice["text"] for choice in event["choices"])
            first = first or time.monotonic()
    return text, first, "" if is_done else "a stream without an end"


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:100].decode(errors="replace")


def _plain(problem: str) -> str:
    """Without the numbers, so that equal problems of different workers are one."""
    return "".join("#" if each.isdigit() else each for each in problem[:4]) + "".join(
        "" if each.isdigit() else each for each in problem[4:160]
    )


async def capacity(asker: Asker) -> float:
    """Requests a second that the cluster serves when it has always enough of them."""
    outcomes = Outcomes()
    end = time.monotonic() + CAPACITY_S

    async def client() -> None:
        while time.monotonic() < end:
            await asker.ask(outcomes)

    await asyncio.gather(*(client() for _ in range(CAPACITY_CLIENTS)))
    return len(outcomes.took) / (time.monotonic() - end + CAPACITY_S)


async def load(asker: Asker, rate: float, seconds: float, outcomes: Outcomes) -> None:
    """Requests at random times, `rate` a second on average; returns when the last is answered."""
    chance = random.Random(_SEED)
    due, tasks = time.monotonic(), set[asyncio.Task[None]]()
    end = due + seconds
    while (due := due + chance.expovariate(rate)) < end:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        task = asyncio.create_task(asker.ask(outcomes))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)


async def sample(cluster: SoakCluster, samples: Samples, outcomes: Outcomes) -> None:
    """Look at the router's process now and then, until cancelled."""
    said = 0.0
    while True:
        now = time.monotonic()
        try:
            memory, caches = cluster.router_memory(), await asyncio.to_thread(cluster.router_caches)
        except OSError as e:
            # A busy router may be late; whether it answers is what the requests show.
            progress(f"no sample: the router does not show its metrics ({e})")
            await asyncio.sleep(SAMPLE_EVERY_S)
            continue
        samples.at.append(now)
        samples.mib.append(memory)
        samples.own.append(memory - caches)
        samples.files.append(cluster.router_files())
        if now - said > 30:
            said = now
            progress(
                f"{outcomes.total} requests, {outcomes.failed.total()} not answered in full; router: "
                f"{samples.mib[-1]:.0f} MiB, {samples.files[-1]:.0f} descriptors"
            )
        await asyncio.sleep(SAMPLE_EVERY_S)


async def soak(cluster: SoakCluster, seconds: float, report: Report) -> None:
    """Measure into `report`. Memory is judged in runs of full length only."""
    outcomes, samples = Outcomes(), Samples()
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
        asker = Asker(cluster.router_url, session, _SEED)
        most = await capacity(asker)
        rate = PART * most
        progress(f"capacity {most:.1f} requests/s; {rate:.1f} a second for {seconds:.0f} s with faults")
        faults = RandomFaults(cluster, random.Random(_SEED), FAULT_EVERY_S)
        sampling = asyncio.create_task(sample(cluster, samples, outcomes))
        cpu, began = cluster.router_cpu(), time.monotonic()
        await asyncio.gather(load(asker, rate, seconds, outcomes), faults.run(seconds))
        cpu, took = cluster.router_cpu() - cpu, time.monotonic() - began
        await asyncio.sleep(SETTLE_S)
        sampling.cancel()
    success = len(outcomes.took) / max(1, outcomes.total)
    report.results.append(
        {
            "seconds": round(took),
            "capacity/s": round(most, 1),
            "rate/s": round(rate, 1),
            "requests": outcomes.total,
            "success %": round(100 * success, 3),
            "p50 s": round(percentile(outcomes.took, 50), 3),
            "p99 s": round(percentile(outcomes.took, 99), 3),
            "slowest s": round(max(outcomes.took), 2),
            "TTFT p99 s": round(percentile(outcomes.first, 99), 3),
            "router CPU %": round(100 * cpu / took, 1),
        }
    )
    named = {
        "memory MiB": samples.mib,
        "memory without prompt caches MiB": samples.own,
        "descriptors": samples.files,
    }
    for name, values in named.items():
        report.results.append(
            {
                "router": name,
                "first": round(values[0], 1),
                "last": round(values[-1], 1),
                "highest": round(max(values), 1),
                "growth": round(Samples.growth(values), 1),
            }
        )
    report.results += [{"fault": name, "times": times} for name, times in sorted(faults.done.items())]
    report.results += [{"not answered in full": why, "requests": n} for why, n in outcomes.failed.most_common()]
    report.targets += [
        Target.at_least("answered in full", round(success, 5), MIN_SUCCESS),
        Target.at_most("slowest answer, s", round(max(outcomes.took), 2), DEADLINE_S),
        Target.at_most("descriptors, more than before the load", samples.files[-1] - samples.files[0], MAX_MORE_FILES),
    ]
    if seconds >= SECONDS:
        report.targets.append(Target.at_most("memory growth, MiB", round(Samples.growth(samples.mib), 1), MAX_MORE_MIB))
    else:
        report.notes.append("memory is not judged: the router's caches take minutes to reach their limits")


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(__doc__ or "", argv)
    report = Report("soak")
    with SoakCluster(speed=SPEED, sequences=SEQUENCES) as cluster:
        asyncio.run(soak(cluster, QUICK_SECONDS if args.quick else SECONDS, report))
    report.show(as_json=args.json)
    return 0 if all(target.ok for target in report.targets) else 1


if __name__ == "__main__":
    sys.exit(main())

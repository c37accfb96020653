"""The part of `benchmarks.disagg` on real vLLM: streams that run while long prompts arrive, and long prompts alone."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp

from benchmarks.common import progress
from scripts.models import tiny_model_dir
from vllm_pd.graph.local import LocalCluster

MODEL = "m"
DEADLINE_S = 120.0
VOCABULARY = range(300, 2000)
STREAMS = 4
STREAM_PROMPT, STREAM_OUTPUT = 40, 150
LONG_PROMPT, LONG_OUTPUT = 1500, 16


@dataclass(frozen=True, slots=True)
class Scene:
    """What is asked of the cluster during a round."""

    name: str
    streams: int
    """Requests with a short prompt and a long answer that run all the time."""
    pause: float
    """Mean seconds between two long prompts."""


SCENES = (
    Scene("long prompts alone", 0, 1.5),
    Scene("streams alone", STREAMS, 1e9),
    Scene("streams and long prompts", STREAMS, 0.6),
)


@dataclass(slots=True)
class Seen:
    """What clients saw. Seconds."""

    first: list[float] = field(default_factory=list)
    """Of long prompts, else of the streams: to the first token."""
    gaps: list[float] = field(default_factory=list)
    """Between two tokens of a stream; of long prompts where there are none."""
    whole: list[float] = field(default_factory=list)
    """From a request to its end, all requests."""
    tokens: int = 0
    seconds: float = 0.0


def measure(rules: Sequence[str], seconds: float, rounds: int) -> tuple[dict[tuple[str, str], Seen], str]:
    """What was seen by scene and rule, over rounds in which the rules take turns; and a note on what was split."""
    found = {(scene.name, rule): Seen() for scene in SCENES for rule in rules}
    progress("starting a prefill and a decode worker")
    with LocalCluster(
        model=tiny_model_dir(), prefill=1, decode=1, max_model_len=2048, kv_blocks=256,
        worker_args=("--served-model-name", MODEL),
    ) as cluster:  # fmt: skip
        asyncio.run(_round(cluster.router_url, SCENES[-1], "always", seconds, 0, Seen()))
        asyncio.run(_round(cluster.router_url, SCENES[-1], "never", seconds, 1, Seen()))
        for number in range(rounds):
            for scene in SCENES:
                progress(f"round {number + 1} of {rounds}: {scene.name}")
                turn = number % len(rules)
                for rule in (*rules[turn:], *rules[:turn]):
                    seed = 2 + number * len(SCENES) + SCENES.index(scene)
                    asyncio.run(_round(cluster.router_url, scene, rule, seconds, seed, found[scene.name, rule]))
        split = cluster.router_metrics().value("vllm_pd_router_split_total")
    return found, f"real vLLM: {int(split)} requests were split in all"


async def _round(url: str, scene: Scene, rule: str, seconds: float, seed: int, seen: Seen) -> None:
    """One round: requests begin during `seconds` and are waited for."""
    chance = random.Random(f"{seed} {rule}")
    times = random.Random(seed)
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S)) as client,
        asyncio.TaskGroup() as group,
    ):
        began = time.perf_counter()

        def left() -> float:
            return seconds - (time.perf_counter() - began)

        async def stream() -> None:
            while left() > 0:
                await _ask(client, url, rule, _prompt(chance, STREAM_PROMPT), STREAM_OUTPUT, seen, True, not has_long)

        has_long = scene.pause < seconds
        for _ in range(scene.streams):
            group.create_task(stream())
        while (pause := times.expovariate(1 / scene.pause)) < left():
            await asyncio.sleep(pause)
            prompt = _prompt(chance, LONG_PROMPT)
            group.create_task(_ask(client, url, rule, prompt, LONG_OUTPUT, seen, not scene.streams, True))
    seen.seconds += time.perf_counter() - began


async def _ask(
    client: aiohttp.ClientSession,
    url: str,
    rule: str,
    prompt: list[int],
    output: int,
    seen: Seen,
    gaps: bool,
    first: bool,
) -> None:
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": output,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    began = last = time.perf_counter()
    async with client.post(f"{url}/v1/completions", json=body, headers={"x-vllm-pd-disagg": rule}) as answer:
        if answer.status != 200:
            raise SystemExit(f"{url} answered {answer.status}: {(await answer.text())[:500]}")
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise SystemExit(f"{url} ended a stream with an error: {event['error']}")
            now = time.perf_counter()
            if last != began:
                if gaps:
                    seen.gaps.append(now - last)
            elif first:
                seen.first.append(now - began)
            last = now
            seen.tokens += 1
    seen.whole.append(time.perf_counter() - began)


def _prompt(chance: random.Random, tokens: int) -> list[int]:
    return [chance.choice(VOCABULARY) for _ in range(tokens)]

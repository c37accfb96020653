"""Measurements of a worker, from a file or from the worker itself, to fit a timing model to."""

from __future__ import annotations

import json
import random
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from vllm_pd.errors import PDError, SettingsError
from vllm_pd.sim.timing import PrefillSample, StepSample

REQUEST_TIMEOUT_S = 300
_RUNNING = (1, 4, 16)
_LONG_ANSWER = 48


def read_samples(path: Path) -> tuple[list[PrefillSample], list[StepSample]]:
    """Read JSON lines: `{"uncached": n, "cached": n, "seconds": s}` for a prefill alone on the worker, or
    `{"running": n, "kv_usage": p, "seconds": s}` for a decode step. Raises SettingsError, naming the line."""
    prefills: list[PrefillSample] = []
    steps: list[StepSample] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "it is not UTF-8 text"
        raise SettingsError(f"The samples {path} cannot be read: {reason}.") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            if "uncached" in fields:
                prefills.append(
                    PrefillSample(int(fields["uncached"]), int(fields.get("cached", 0)), float(fields["seconds"]))
                )
            else:
                steps.append(
                    StepSample(int(fields["running"]), float(fields.get("kv_usage", 0)), float(fields["seconds"]))
                )
        except (ValueError, TypeError, KeyError):
            raise SettingsError(
                f"{path}, line {number}: a sample is an object with uncached, cached and seconds, "
                "or with running, kv_usage and seconds."
            ) from None
    return prefills, steps


def measure(url: str, *, longest: int = 2048, seed: int = 0) -> tuple[list[PrefillSample], list[StepSample]]:
    """Measure an idle OpenAI-compatible worker: prompts of random tokens up to `longest`, new and repeated.

    Takes about a minute on a CPU and seconds on a GPU. Raises PDError when the worker does not answer as it should.
    """
    worker = _Worker(url.rstrip("/"))
    chance = random.Random(seed)
    longest = min(longest, worker.max_model_len - 64)

    def tokens(count: int) -> list[int]:
        return [chance.randrange(100, 1000) for _ in range(count)]

    worker.ask(tokens(longest // 2))
    prefills: list[PrefillSample] = []
    for part in (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1):
        prompt = tokens(max(16, int(longest * part)))
        first, _, _ = worker.ask(prompt)
        prefills.append(PrefillSample(len(prompt), 0, first))
        prompt = prompt[: len(prompt) * 3 // 4] + tokens(len(prompt) // 4)
        first, _, cached = worker.ask(prompt)
        if cached is not None:
            prefills.append(PrefillSample(len(prompt) - cached, cached, first))
    steps: list[StepSample] = []
    for running in _RUNNING:
        with ThreadPoolExecutor(running) as pool:
            prompts = [tokens(16) for _ in range(running)]
            steps += [StepSample(running, 0.0, later) for _, later, _ in pool.map(worker.ask_long, prompts)]
    return prefills, steps


class _Worker:
    def __init__(self, url: str) -> None:
        self._url = url
        models = self._open("/v1/models", None).read()
        try:
            model = json.loads(models)["data"][0]
            self._model = str(model["id"])
            self.max_model_len = int(model.get("max_model_len") or 4096)
        except (ValueError, KeyError, IndexError, TypeError):
            raise PDError(f"{url}/v1/models does not list a model; is it an OpenAI-compatible worker?") from None

    def ask_long(self, prompt: list[int]) -> tuple[float, float, int | None]:
        """`ask` for an answer of some length."""
        return self.ask(prompt, _LONG_ANSWER)

    def ask(self, prompt: list[int], output: int = 1) -> tuple[float, float, int | None]:
        """Seconds to the first token, mean seconds between later ones, and cached tokens as the worker reports them
        (`--enable-prompt-tokens-details`; None when it does not)."""
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": output,
            "min_tokens": output,
            "ignore_eos": True,
            "stream": True,
            "temperature": 0,
            "stream_options": {"include_usage": True},
        }
        began = time.perf_counter()
        times: list[float] = []
        cached: int | None = None
        with self._open("/v1/completions", body) as reply:
            for line in reply:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if event.get("choices"):
                    times.append(time.perf_counter())
                if event.get("usage"):
                    details = event["usage"].get("prompt_tokens_details")
                    cached = None if details is None else int(details.get("cached_tokens") or 0)
        if not times:
            raise PDError(f"{self._url} streamed no token; see its log.")
        return times[0] - began, (times[-1] - times[0]) / max(1, output - 1), cached

    def _open(self, path: str, body: object) -> Any:
        request = urllib.request.Request(
            self._url + path,
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            return urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S)
        except urllib.error.HTTPError as e:
            raise PDError(f"{self._url}{path} answered {e.code}: {e.read(300).decode(errors='replace')}") from None
        except OSError as e:
            raise PDError(f"{self._url}{path} cannot be reached: {e}.") from None

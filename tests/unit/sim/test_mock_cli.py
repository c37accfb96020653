"""`vllm-pd mock-worker` as a process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator

import pytest

from vllm_pd.cli import main

DEADLINE_S = 60

Start = Callable[..., tuple["subprocess.Popen[str]", str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts the command with flags and returns the process and its first URL."""
    started: list[subprocess.Popen[str]] = []

    def run(*flags: str) -> tuple[subprocess.Popen[str], str]:
        command = [sys.executable, "-m", "vllm_pd.cli", "mock-worker", "--port", "0", "--speed", "50", *flags]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("ready: "), line
        return process, line.split()[1]

    yield run
    for process in started:
        process.kill()
        process.wait(DEADLINE_S)


def ask(url: str, body: object) -> object:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as reply:
        return json.loads(reply.read())


def test_it_serves_until_it_is_told_to_stop(start: Start) -> None:
    process, url = start("--count", "3", "--lora", "small=/adapters/small", "--fault", "delay=0.01")
    reply = ask(f"{url}/v1/completions", {"model": "small", "prompt": "hello", "max_tokens": 3})
    assert isinstance(reply, dict) and reply["usage"]["completion_tokens"] == 3
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE_S) == 0


def test_a_worker_that_is_told_to_die_ends_its_process(start: Start) -> None:
    process, url = start()
    ask(f"{url}/mock/faults", {"die": True})
    assert process.wait(DEADLINE_S) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--count", "0"), "--count must be above 0"),
        (("--role", "leader"), "prefill, decode or both"),
        (("--fault", "explode"), "explode"),
        (("--fault", "die"), "/mock/faults"),
        (("--lora", "name"), "NAME=PATH"),
        (("--tokenizer", "no-such-folder"), "--tokenizer"),
        (("--store", "http://x", "--port", "0"), "store URL"),
    ],
)
def test_wrong_settings_end_with_2_and_a_sentence(
    flags: tuple[str, ...], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["mock-worker", *flags]) == 2
    assert message in capfd.readouterr().err

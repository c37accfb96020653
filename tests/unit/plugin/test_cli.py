"""`vllm-pd`: what it prints and how it ends."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path

import pytest

from tests.conformance.registry import worker
from vllm_pd.cli import main
from vllm_pd.graph.ports import free_port
from vllm_pd.state import Role, WorkerLoad, open_registry

SECRET_STORE = "redis://u:hunter2@127.0.0.1:1"


def test_config_shows_each_value_and_where_it_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "pd.yaml"
    file.write_text("kv-connector: pd\nnamespace: blue\n")
    monkeypatch.setenv("VLLM_PD_CPU_GIB", "2")
    monkeypatch.setenv("VLLM_PD_STORE", SECRET_STORE)
    assert main(["config", "--role", "prefill", "--pd-config", str(file), "--json"]) == 0
    out = capsys.readouterr().out
    shown = json.loads(out)
    assert shown["kv_connector"] == {"value": "pd", "source": f"kv-connector in {file}"}
    assert shown["role"] == {"value": "prefill", "source": "flag"}
    assert shown["cpu_gib"] == {"value": "2.0", "source": "environment"}
    assert shown["namespace"] == {"value": "blue", "source": "file"}
    assert shown["lease_s"]["source"] == "default"
    assert "hunter2" not in out


def test_config_without_a_connector_says_that_it_is_off(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["setting", "value", "from"]
    assert "vllm-pd is off" in lines[1]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["config", "--role", "prefil"], "did you mean 'prefill'"),
        (["config", "--pd-ssd-gib", "1"], "--pd-ssd-path"),
        (["config", "--pd-config", "/none/such"], "/none/such"),
        (["workers"], "--store redis://HOST:PORT"),
        (["workers", "--store", "http://h:1"], "redis"),
        (["workers", "--store", SECRET_STORE, "--namespace", "a b"], "letters"),
    ],
)
def test_a_wrong_setting_ends_with_2_and_one_sentence(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("vllm-pd: error: ") and words in shown.err and shown.err.count("\n") == 1
    assert "hunter2" not in shown.err


def test_a_store_that_is_away_ends_with_1_and_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["workers", "--store", f"redis://:hunter2@127.0.0.1:{free_port()}"]) == 1
    shown = capsys.readouterr().err
    assert "cannot be used" in shown and "hunter2" not in shown


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_an_empty_namespace_ends_with_1_in_either_form(
    form: list[str], store_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["workers", "--store", store_url, "--namespace", "cli-empty", *form]) == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out) == [] if form else "No worker is registered in namespace 'cli-empty'" in shown.err


def test_workers_are_listed_with_role_and_load(
    store_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = dataclasses.replace(worker("a:1"), role=Role.DECODE)

    async def register() -> None:
        registry = open_registry(store_url, "cli", timeout_s=5.0)
        await registry.heartbeat(record, 600_000)
        await registry.publish_load(record.id, record.pool.id, 0, {0: WorkerLoad(3, 2, 0.5, 1)}, 600_000)
        await registry.close()

    asyncio.run(register())
    monkeypatch.setenv("VLLM_PD_STORE", store_url)
    monkeypatch.setenv("VLLM_PD_NAMESPACE", "cli")
    assert main(["workers", "--json"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)
    assert (shown["id"], shown["role"], shown["running"], shown["waiting"]) == ("a:1", "decode", 3, 2)
    assert shown["pool"] == record.pool.id and 0 < shown["lease_left_ms"] <= 600_000
    assert main(["workers"]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["worker", "role", "url"]
    assert row.split()[:2] == ["a:1", "decode"] and "50%" in row


@pytest.mark.parametrize("argv", [[], ["nothing"], ["config", "--no-such"]])
def test_a_wrong_command_line_ends_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert "usage: vllm-pd" in capsys.readouterr().err

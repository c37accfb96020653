"""`vllm-pd tiers stat|verify|clear` on the folder of a real store, used by a process or not."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba")

from vllm_pd.cli import main
from vllm_pd.kv_offload.block_io.thread_io import ThreadIO
from vllm_pd.kv_offload.segments import Rows, SegmentStore, StoreConfig
from vllm_pd.kv_offload.ssd_config import ROOT_NAME

BLOCK = 8192
BLOCKS = 40
PATIENCE_S = 30.0


def filled(path: Path, name: str) -> SegmentStore:
    """A store with `BLOCKS` blocks, in use."""
    config = StoreConfig(
        root=path / ROOT_NAME,
        name=name,
        namespace=hashlib.sha256(name.encode()).digest(),
        block_bytes=BLOCK,
        budget_bytes=64 << 20,
        floor_bytes=0,
        staging_bytes=16 << 20,
        about={"model": name, "dtype": "bfloat16", "layout": "LBHNC"},
    )
    store = SegmentStore(config, ThreadIO())
    store.start()
    assert store.wait_recovered(PATIENCE_S)
    keys = [f"{n:036d}".encode() for n in range(BLOCKS)]
    blocks = bytearray().join((key * BLOCK)[:BLOCK] for key in keys)
    store.put(1, keys, Rows(memoryview(blocks), range(BLOCKS)))
    assert store.drain(PATIENCE_S) and store.flush(PATIENCE_S)
    assert store.stats().blocks == BLOCKS
    return store


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Path]:
    """A folder with the namespaces `left`, used by nobody, and `used`."""
    filled(tmp_path, "left").close(PATIENCE_S)
    store = filled(tmp_path, "used")
    yield tmp_path
    store.close(PATIENCE_S)


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, Any, str]:
    """Exit code, the JSON that was printed, and stderr."""
    code = main(["tiers", *(str(arg) for arg in argv), "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else None, err


def damage(path: Path, name: str) -> None:
    """Turn a bit of every page in the middle of the namespace's first segment."""
    file = min((path / ROOT_NAME / name).glob("segment-*.kv"))
    raw = bytearray(file.read_bytes())
    used = raw.rstrip(b"\0")
    raw[len(used) // 2] ^= 1
    file.write_bytes(raw)


def test_stat_shows_each_model_and_who_uses_it(live: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, shown, _ = run(capsys, "stat", live)
    by_name = {namespace["name"]: namespace for namespace in shown["namespaces"]}
    assert code == 0 and set(by_name) == {"left", "used"}
    assert all(n["blocks"] == BLOCKS and n["block_bytes"] == BLOCK for n in by_name.values())
    assert by_name["left"]["pid"] is None and by_name["used"]["pid"] > 0
    assert main(["tiers", "stat", str(live / ROOT_NAME)]) == 0
    out = capsys.readouterr().out
    assert f"process {by_name['used']['pid']}" in out and "bfloat16" in out and "are free" in out


def test_verify_finds_what_was_damaged_and_nothing_else(live: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, shown, _ = run(capsys, "verify", live)
    assert code == 0 and [n["good"] + n["unfinished"] for n in shown["namespaces"]] == [BLOCKS, BLOCKS]
    damage(live, "left")
    code, shown, _ = run(capsys, "verify", live)
    left, used = shown["namespaces"]
    assert code == 1 and (left["corrupt"], left["good"], left["ok"]) == (1, BLOCKS - 1, False)
    assert used["ok"] and used["corrupt"] == 0
    assert main(["tiers", "verify", str(live), "--namespace", "left"]) == 1
    out, err = capsys.readouterr()
    assert "used" not in out and "not what was stored" in err


def test_clear_leaves_what_a_server_uses(live: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, shown, _ = run(capsys, "clear", live, "--all")
    left, used = shown["namespaces"]
    assert code == 1 and left["segments"] >= 1 and not left["refused"]
    assert used["segments"] == 0 and "in use by process" in used["refused"]
    assert [path.name for path in (live / ROOT_NAME).iterdir() if path.is_dir()] == ["used"]
    code, shown, _ = run(capsys, "stat", live)
    assert code == 0 and [n["blocks"] for n in shown["namespaces"]] == [BLOCKS]


def test_one_namespace_is_cleared_by_its_name(live: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, shown, _ = run(capsys, "clear", live, "--namespace", "left")
    assert code == 0 and [n["name"] for n in shown["namespaces"]] == ["left"]
    assert not (live / ROOT_NAME / "left").exists()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["stat", "{other}"], "no SSD tier was ever in it"),
        (["verify", "{live}", "--namespace", "lefd"], "did you mean 'left'"),
        (["clear", "{live}", "--namespace", "left", "--namespace", "none"], "no namespace 'none'"),
    ],
)
def test_a_wrong_folder_or_name_ends_with_2_and_changes_nothing(
    live: Path,
    tmp_path_factory: pytest.TempPathFactory,
    argv: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    places = {"live": live, "other": tmp_path_factory.mktemp("other")}
    assert main(["tiers", *(arg.format(**places) for arg in argv)]) == 2
    assert words in capsys.readouterr().err
    assert run(capsys, "verify", live)[0] == 0


def test_clear_needs_to_be_told_what(live: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["tiers", "clear", str(live)])
    assert caught.value.code == 2 and "--all" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("missing", "code", "words"), [(("vllm", "torch", "nixl"), 0, ""), (("numba",), 2, "pip install numba")]
)
def test_it_works_where_no_engine_is_installed_and_says_what_it_needs(
    live: Path, missing: tuple[str, ...], code: int, words: str
) -> None:
    script = f"""
        import sys
        for name in {missing!r}:
            sys.modules[name] = None
        from vllm_pd.cli import main
        sys.exit(main(["tiers", "verify", {str(live)!r}]))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == code and words in done.stderr, done.stderr

"""`vllm-pd tiers size` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_pd.cli import main


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Ten conversations of five turns, each turn five blocks longer than the one before."""
    lines = []
    for turn in range(1, 6):
        for talk in range(10):
            ids = [1000 * talk + i for i in range(5 * turn)]
            fields = {
                "timestamp": len(lines),
                "input_length": 512 * 5 * turn + 7,
                "output_length": 5,
                "hash_ids": [*ids, 0],
            }
            lines.append(json.dumps(fields))
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines))
    return path


def sizes(trace: Path, *flags: str) -> list[str]:
    return ["tiers", "size", "--trace", str(trace), "--jobs", "1", "--quiet", *flags]


def test_the_default_is_from_no_tier_to_all_that_the_trace_holds(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(sizes(trace, "--gpu-blocks", "40", "--json")) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["requests"], shown["trace"], shown["kv_bytes_per_token"]) == (50, "trace.jsonl", None)
    assert [cell["cpu_blocks"] for cell in shown["cells"]] == [0, 3, 7, 15, 31, 62, 125, 250]
    totals = [cell["hit_total"] for cell in shown["cells"]]
    # Every prompt but the last turn's new part was there before: 10 of 15 parts.
    assert totals[-1] == shown["unlimited"] == 0.66667
    assert totals[0] == shown["cells"][0]["hit_gpu"] < totals[-1] and shown["cells"][0]["hit_cpu"] == 0


def test_sizes_in_gib_follow_from_the_model(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = ("--model", str(tmp_path), "--gpu-gib", "2.5", "--cpu-gib", "0,4", "--ssd-gib", "0,16")
    assert main(sizes(trace, *flags, "--json")) == 0
    cells = json.loads(capsys.readouterr().out)["cells"]
    # 128 KiB a token, 64 MiB a block of 512. An SSD without a CPU tier above it does not exist.
    assert [(cell["gpu_blocks"], cell["cpu_blocks"], cell["ssd_blocks"]) for cell in cells] == [
        (40, 0, 0),
        (40, 64, 0),
        (40, 64, 256),
    ]
    assert cells[2]["hit_ssd"] > 0 and cells[2]["hit_total"] == 0.66667
    assert main(sizes(trace, "--kv-bytes-per-token", "131072", *flags[2:])) == 0
    shown = capsys.readouterr().out
    assert "GPU, GiB" in shown and "2.5" in shown and "would have held 66.7%" in shown


def test_policies_are_compared_and_the_enough_is_named(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(sizes(trace, "--gpu-blocks", "40", "--cpu-blocks", "30,250", "--eviction", "lru,optimum")) == 0
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert [line.split()[0] for line in lines[1:5]] == ["lru", "optimum", "lru", "optimum"]
    assert "a CPU tier of 250 blocks (lru) has at least 90%" in shown


def test_progress_goes_to_stderr(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [flag for flag in sizes(trace, "--gpu-blocks", "40", "--cpu-blocks", "30,60") if flag != "--quiet"]
    assert main(flags) == 0
    assert "2/2 GPU 40, CPU 60, SSD 0 blocks, adaptive" in capsys.readouterr().err


def test_a_plot_and_a_page_are_written(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    png, page = tmp_path / "a.png", tmp_path / "a.html"
    assert main(sizes(trace, "--cpu-blocks", "30,60", "--plot", str(png), "--html", str(page))) == 0
    assert png.read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    assert "<svg" in text and "CPU, blocks" in text and "would have held" in text


def test_prompts_that_the_gpu_cannot_hold_are_named(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(sizes(trace, "--gpu-blocks", "20", "--cpu-blocks", "30")) == 0
    assert "Up to 20 prompts are longer" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--gpu-gib", "4"), "--model or --kv-bytes-per-token"),
        (("--eviction", "lruu"), "did you mean 'lru'"),
        (("--kv-bytes-per-token", "9999999999", "--cpu-gib", "1"), "below one block"),
        (("--cpu-blocks", "0", "--ssd-blocks", "5"), "needs a CPU tier"),
        (("--plot", "/absent/a.png"), "cannot be written"),
    ],
)
def test_a_wrong_setting_is_exit_code_2(
    trace: Path, flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(sizes(trace, *flags)) == 2
    assert message in capsys.readouterr().err


def test_a_trace_that_is_not_there_is_named_with_a_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(sizes(tmp_path / "absent.jsonl")) == 2
    assert "Mooncake" in capsys.readouterr().err

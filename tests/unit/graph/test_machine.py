"""What a machine is taken to have."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_pd.errors import GraphError
from vllm_pd.graph import machine


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where nvidia-smi would be; nothing else is on the PATH but the programs of the system."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path / "nvidia-smi"


def write(smi: Path, text: str) -> None:
    smi.write_text(f"#!/bin/sh\n{text}\n")
    smi.chmod(0o755)


def test_gpus_are_those_that_nvidia_smi_lists_or_that_the_environment_names(
    smi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(smi, "echo 0; echo 1")
    assert machine.detect().gpus == ("0", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1, GPU-7")
    assert machine.detect().gpus == ("1", "GPU-7")


@pytest.mark.skipif(Path("/usr/bin/nvidia-smi").exists(), reason="needs a machine without GPUs")
def test_without_nvidia_smi_there_are_cores(smi: Path) -> None:
    assert not machine.detect().has_gpu


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("echo 'NVIDIA-SMI has failed: no driver.'; exit 9", "status 9: NVIDIA-SMI has failed: no driver"),
        ("echo broken >&2; exit 12", "status 12: broken"),
        ("exit 0", "lists no GPU"),
        ("exec sleep 60", "did not answer within"),
    ],
)
def test_an_nvidia_smi_that_does_not_work_is_no_machine_without_gpus(
    smi: Path, monkeypatch: pytest.MonkeyPatch, text: str, cause: str
) -> None:
    monkeypatch.setattr(machine, "_QUERY_TIMEOUT_S", 1.0 if "sleep" in text else 60.0)
    write(smi, text)
    with pytest.raises(GraphError, match=f"{cause}.*repair.*CUDA_VISIBLE_DEVICES="):
        machine.detect()


def test_one_that_cannot_be_run_is_told_too(smi: Path) -> None:
    smi.write_bytes(b"\x7fELF, of another machine")
    smi.chmod(0o755)
    with pytest.raises(GraphError, match=r"cannot be run.*CUDA_VISIBLE_DEVICES="):
        machine.detect()


@pytest.mark.parametrize("visible", ["", "-1"])
def test_who_wants_cores_says_so_and_nvidia_smi_is_not_asked(
    smi: Path, monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    write(smi, "exit 9")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert not machine.detect().has_gpu

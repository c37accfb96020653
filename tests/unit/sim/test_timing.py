"""The default timing is the published formula; a fitted one finds the worker that was measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_pd.errors import SettingsError
from vllm_pd.sim.samples import read_samples
from vllm_pd.sim.timing import PrefillSample, StepSample, TimingModel, fit


@pytest.mark.parametrize("tokens", [1, 1000, 12_000, 100_000])
def test_a_whole_uncached_prompt_takes_the_published_time(tokens: int) -> None:
    published = 4.209989e-07 * tokens**2 + 1.518344e-02 * tokens + 16.50142
    assert TimingModel().whole_prefill(tokens) * 1000 == pytest.approx(published)


@pytest.mark.parametrize("usage", [0.0, 0.3, 1.0])
def test_a_decode_step_takes_the_published_time(usage: float) -> None:
    published = max(1, -25.74 * usage**2 + 54.01 * usage + 5.74)
    assert TimingModel().decode(usage, 7) * 1000 == pytest.approx(published)


def test_a_fit_recovers_the_model_that_gave_the_samples() -> None:
    truth = TimingModel(
        prefill_base=0.02,
        prefill_token=1e-4,
        prefill_square=3e-9,
        cached_square=2e-9,
        decode_base=0.01,
        decode_kv=0.02,
        decode_kv_square=0.0,
        decode_sequence=3e-4,
    )
    prefills = [
        PrefillSample(n, c, truth.whole_prefill(n, c)) for n in (64, 512, 2000, 9000) for c in (0, 1024, 16_384)
    ]
    steps = [StepSample(s, p, truth.decode(p, s)) for s in (1, 8, 64) for p in (0.05, 0.5)]
    found = fit(prefills, steps)
    for name in ("prefill_base", "prefill_token", "prefill_square", "cached_square", "decode_base", "decode_kv"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=1e-3), name


def test_a_fit_of_noise_has_no_negative_term() -> None:
    samples = [PrefillSample(n, 0, s) for n, s in ((100, 0.05), (1000, 0.045), (4000, 0.06), (8000, 0.055))]
    found = fit(samples)
    assert min(found.prefill_base, found.prefill_token, found.prefill_square, found.cached_square) >= 0
    assert found.whole_prefill(4000) == pytest.approx(0.055, rel=0.3)
    assert found.decode_base == TimingModel().decode_base


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(SettingsError, match="at least 3 samples"):
        fit([PrefillSample(100, 0, 0.1)])


def test_a_timing_file_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "timing.json"
    timing = TimingModel(prefill_base=0.5)
    timing.save(path)
    assert TimingModel.load(path) == timing
    path.write_text('{"decode_base": 0.1}')
    assert TimingModel.load(path) == TimingModel(decode_base=0.1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "one JSON object"),
        ('{"speed": 1}', "prefill_base"),
        ('{"decode_kv": "fast"}', "decode_kv"),
        ("{", "not JSON"),
    ],
)
def test_a_wrong_timing_file_is_refused_with_its_fault(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "timing.json"
    path.write_text(text)
    with pytest.raises(SettingsError, match=message):
        TimingModel.load(path)


def test_samples_are_read_and_a_wrong_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text(
        '{"uncached": 10, "cached": 32, "seconds": 0.1}\n\n{"running": 3, "kv_usage": 0.5, "seconds": 0.02}\n'
    )
    assert read_samples(path) == ([PrefillSample(10, 32, 0.1)], [StepSample(3, 0.5, 0.02)])
    path.write_text('{"uncached": 10, "seconds": 0.1}\n{"seconds": 3}\n')
    with pytest.raises(SettingsError, match="line 2"):
        read_samples(path)

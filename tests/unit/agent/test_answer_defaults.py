"""What a server does with answers on its own account, compared with vLLM's own arithmetic."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_pd.agent.answer_defaults import AnswerDefaults, answer_defaults


def model_config(source: str, override: dict[str, Any], model: dict[str, Any]) -> SimpleNamespace:
    """Of a model whose generation_config.json says `model`."""
    values = {**({} if source == "vllm" else model), **override}
    names = {"max_new_tokens": "max_tokens"}
    return SimpleNamespace(
        generation_config=source,
        override_generation_config=override,
        get_diff_sampling_param=lambda: {names.get(name, name): value for name, value in values.items()},
    )


@pytest.mark.parametrize(
    ("source", "override", "model", "wanted"),
    [
        ("auto", {}, {}, AnswerDefaults(0, 0, False)),
        ("auto", {}, {"max_new_tokens": 50}, AnswerDefaults(0, 50, False)),
        ("auto", {"max_new_tokens": 70}, {"max_new_tokens": 50}, AnswerDefaults(70, 70, False)),
        ("vllm", {}, {"max_new_tokens": 50, "presence_penalty": 1.0}, AnswerDefaults(0, 0, False)),
        ("/a/folder", {}, {"max_new_tokens": 50}, AnswerDefaults(50, 50, False)),
        ("auto", {}, {"presence_penalty": 1.0}, AnswerDefaults(0, 0, True)),
        ("auto", {"frequency_penalty": -0.5}, {}, AnswerDefaults(0, 0, True)),
        ("auto", {"temperature": 0.6, "presence_penalty": 0.0}, {}, AnswerDefaults(0, 0, False)),
    ],
)
def test_limits_and_penalties(
    source: str, override: dict[str, Any], model: dict[str, Any], wanted: AnswerDefaults
) -> None:
    config = model_config(source, override, model)
    assert answer_defaults(config) == wanted
    utils = pytest.importorskip("vllm.entrypoints.serve.utils.api_utils")
    defaults = config.get_diff_sampling_param()
    # As vLLM's chat server derives it.
    own_cap = defaults.get("max_tokens") if source not in ("auto", "vllm") else override.get("max_new_tokens")
    for asked in (None, 10, 60, 1000):
        limits = [limit for limit in (asked or wanted.default_answer_limit, wanted.answer_cap, 2048 - 48) if limit]
        assert utils.get_max_tokens(2048, asked, 48, defaults, own_cap) == min(limits)

"""What a server does with answers on its own account, from its generation configuration. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_OPERATORS_OWN = ("auto", "vllm")
"""Values of --generation-config under which only --override-generation-config caps what a request may ask for."""


@dataclass(frozen=True, slots=True)
class AnswerDefaults:
    """See the fields of the same names of `WorkerRecord`."""

    answer_cap: int
    default_answer_limit: int
    penalises_answers: bool


def answer_defaults(model_config: Any) -> AnswerDefaults:
    """As vLLM's servers of chats and completions read them from a started engine's `ModelConfig`."""
    defaults = model_config.get_diff_sampling_param()
    limit = defaults.get("max_tokens")
    if model_config.generation_config in _OPERATORS_OWN:
        cap = model_config.override_generation_config.get("max_new_tokens")
    else:
        cap = limit
    penalises = any(defaults.get(name) for name in ("presence_penalty", "frequency_penalty"))
    return AnswerDefaults(int(cap or 0), int(limit or 0), penalises)

"""What a server publishes of its tokenizer, by vLLM's own rules."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers

from vllm_pd.agent.tokenizer_files import Rendering, served_tokenizer_files
from vllm_pd.state.base import TokenizerFiles

pytestmark = pytest.mark.vllm


def model_config(folder: Path, **changes: Any) -> SimpleNamespace:
    """What of vLLM's `ModelConfig` is read."""
    attributes: dict[str, Any] = {
        "model": str(folder),
        "revision": None,
        "code_revision": None,
        "tokenizer": str(folder),
        "tokenizer_revision": None,
        "tokenizer_mode": "auto",
        "runner_type": "generate",
        "trust_remote_code": False,
        "skip_tokenizer_init": False,
        "enable_prompt_embeds": False,
        "hf_config": SimpleNamespace(model_type="llama"),
    }
    return SimpleNamespace(**(attributes | changes))


def served(folder: Path, rendering: Rendering | None = None, **changes: Any) -> TokenizerFiles:
    files = served_tokenizer_files(model_config(folder, **changes), rendering or Rendering())
    assert files is not None
    return files


@pytest.fixture
def copy(tiny_model: Path, tmp_path: Path) -> Path:
    """The tiny model's tokenizer in a folder to change."""
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "chat_template.jinja"):
        shutil.copy(tiny_model / name, tmp_path)
    return tmp_path


def test_the_servers_own_tokenizer_and_template_are_published(tiny_model: Path) -> None:
    files = served(tiny_model)
    text = "Hello <|user|> wörld"
    theirs = tokenizers.Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    assert tokenizers.Tokenizer.from_buffer(files.tokenizer_json).encode(text).ids == theirs.encode(text).ids
    assert files.chat_template == (tiny_model / "chat_template.jinja").read_text()
    assert (files.content_format, files.tool_template) == ("string", "")
    assert files.special_tokens["bos_token"] == "<|bos|>"


def test_flags_of_the_server_are_published(tiny_model: Path) -> None:
    rendering = Rendering(
        chat_template="{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}",
        template_kwargs={"enable_thinking": False},
        drops_unused_tools=True,
    )
    files = served(tiny_model, rendering)
    assert files.chat_template == rendering.chat_template
    assert files.content_format == "openai"
    assert json.loads(files.template_kwargs) == {"enable_thinking": False}
    assert files.drops_unused_tools
    assert served(tiny_model, Rendering(content_format="openai")).content_format == "openai"


def test_a_template_of_its_own_for_tools_is_published(copy: Path) -> None:
    (copy / "chat_template.jinja").unlink()
    named = [{"name": "default", "template": "plain {{ messages }}"}, {"name": "tool_use", "template": "{{ tools }}"}]
    config = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    files = served(copy)
    assert (files.chat_template, files.tool_template) == ("plain {{ messages }}", "{{ tools }}")


@pytest.mark.parametrize(
    "changes", [{"enable_prompt_embeds": True}, {"hf_config": SimpleNamespace(model_type="gpt_oss")}]
)
def test_chats_that_code_renders_have_no_template(tiny_model: Path, changes: dict[str, Any]) -> None:
    files = served(tiny_model, **changes)
    assert (files.chat_template, files.content_format, files.tool_template) == ("", "", "")
    assert files.tokenizer_json


@pytest.mark.parametrize("changes", [{"skip_tokenizer_init": True}, {"tokenizer_mode": "mistral"}])
def test_other_kinds_of_tokenizers_are_not_published(tiny_model: Path, changes: dict[str, Any]) -> None:
    assert served_tokenizer_files(model_config(tiny_model, **changes), Rendering()) is None

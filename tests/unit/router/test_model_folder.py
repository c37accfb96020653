"""Tokenizer files of a folder, and the template that vLLM would choose there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_pd.errors import SettingsError
from vllm_pd.router.model_folder import read_tokenizer_files


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_bytes(b'{"version":"1.0"}')
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "from config"}))
    return tmp_path


def template(model: Path) -> str:
    return read_tokenizer_files(model).chat_template


@pytest.mark.parametrize("name", ["", "tokenizer.json"])
def test_a_folder_and_the_file_in_it_are_read_whole(model: Path, name: str) -> None:
    files = read_tokenizer_files(model / name)
    assert files.tokenizer_json == b'{"version":"1.0"}'
    assert json.loads(files.tokenizer_config) == {"chat_template": "from config"}
    assert (files.chat_template, files.tool_template, files.content_format) == ("from config", "", "")


def test_templates_rank_as_in_vllm(model: Path) -> None:
    (model / "chat_template.jinja").write_text("from jinja")
    assert template(model) == "from jinja"
    (model / "chat_template.json").write_text(json.dumps({"chat_template": "from processor"}))
    assert template(model) == "from processor"


def test_of_several_named_templates_one_is_for_tools(model: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    files = read_tokenizer_files(model)
    assert (files.chat_template, files.tool_template) == ("plain", "tools")


@pytest.mark.parametrize("config", ["{}", "[]", "not json", '{"chat_template": 5}'])
def test_a_model_without_a_template_has_an_empty_one(model: Path, config: str) -> None:
    (model / "tokenizer_config.json").write_text(config)
    assert template(model) == ""


def test_a_folder_without_tokenizer_json_is_an_error_that_says_what_to_name(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"name a model's folder or its tokenizer\.json"):
        read_tokenizer_files(tmp_path)

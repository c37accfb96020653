"""Tokenizer files are found on disk, and the template is the one the worker serves with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_pd.agent.tokenizer_files import load_tokenizer_files


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_bytes(b'{"version":"1.0"}')
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "from config"}))
    return tmp_path


def template(model: Path, given: str | None = None) -> str:
    files = load_tokenizer_files(str(model), None, given)
    assert files is not None
    return files.chat_template


def test_a_local_folder_is_read_whole(model: Path) -> None:
    files = load_tokenizer_files(str(model), None, None)
    assert files is not None
    assert files.tokenizer_json == b'{"version":"1.0"}'
    assert json.loads(files.tokenizer_config) == {"chat_template": "from config"}
    assert files.chat_template == "from config"


def test_templates_rank_as_in_vllm(model: Path) -> None:
    (model / "chat_template.jinja").write_text("from jinja")
    assert template(model) == "from jinja"
    (model / "chat_template.json").write_text(json.dumps({"chat_template": "from processor"}))
    assert template(model) == "from processor"
    assert template(model, given="from the flag") == "from the flag"


def test_of_several_named_templates_the_default_counts(model: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert template(model) == "plain"


@pytest.mark.parametrize("config", ["{}", "[]", "not json", '{"chat_template": 5}'])
def test_a_model_without_a_template_has_an_empty_one(model: Path, config: str) -> None:
    (model / "tokenizer_config.json").write_text(config)
    assert template(model) == ""


def test_a_model_without_tokenizer_json_has_no_files(tmp_path: Path) -> None:
    assert load_tokenizer_files(str(tmp_path), None, None) is None


def test_a_mistral_tokenizer_is_not_published(model: Path) -> None:
    (model / "tekken.json").write_text("{}")
    assert load_tokenizer_files(str(model), None, None) is None


@pytest.mark.parametrize("name", ["no/such-model", "s3://bucket/model", "a/b/c/d"])
def test_what_is_neither_a_folder_nor_cached_has_no_files(name: str) -> None:
    assert load_tokenizer_files(name, None, None) is None


def test_a_cached_repository_is_read_without_network(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    cached = {"tokenizer.json": str(model / "tokenizer.json")}
    asked = []

    def from_cache(repo_id: str, filename: str, revision: str | None) -> str | None:
        asked.append((repo_id, revision))
        return cached.get(filename)

    monkeypatch.setattr(hub, "try_to_load_from_cache", from_cache)
    files = load_tokenizer_files("org/model", "v2", None)
    assert files is not None
    assert files.tokenizer_json == b'{"version":"1.0"}'
    assert set(asked) == {("org/model", "v2")}

"""The test model: built once, the same each time, and complete under its name or absent."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from scripts import models
from scripts.models import ModelError, Recipe


def quiet(line: str) -> None:
    pass


def test_the_tiny_model_has_what_a_server_needs(tiny_model: Path) -> None:
    config = json.loads((tiny_model / "config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]) == (4, 256, 2048)
    assert config["num_key_value_heads"] == 4
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    for text in ("def f(x): return x", "naïve 東京 мир 🙂\n\ttabs"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    template = (tiny_model / "chat_template.jinja").read_text()
    assert "add_generation_prompt" in template


def test_building_the_tiny_model_again_gives_the_same_bytes(tiny_model: Path, tmp_path: Path) -> None:
    again = models.tiny_model_dir(tmp_path)
    for name in ("model.safetensors", "tokenizer.json"):
        digests = {hashlib.sha256((folder / name).read_bytes()).hexdigest() for folder in (tiny_model, again)}
        assert len(digests) == 1, name


def test_a_finished_model_is_not_built_again_and_a_newer_recipe_is(tmp_path: Path) -> None:
    built: list[int] = []

    def recipe(version: int) -> Recipe:
        return Recipe("m", version, lambda out, say: built.append(version))

    for version in (1, 1, 2, 2):
        models.build(recipe(version), tmp_path, quiet)
    assert built == [1, 2]


def test_a_failed_build_leaves_no_folder_under_the_models_name(tmp_path: Path) -> None:
    def fail(out: Path, say: models.Say) -> None:
        (out / "half").write_text("x")
        raise ModelError("no space")

    with pytest.raises(ModelError):
        models.build(Recipe("m", 1, fail), tmp_path, quiet)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_what_a_killed_build_left_is_not_taken_over(tmp_path: Path) -> None:
    stale = tmp_path / ".m.part"
    stale.mkdir()
    (stale / "half").write_text("x")
    folder = models.build(Recipe("m", 1, lambda out, say: None), tmp_path, quiet)
    assert [path.name for path in folder.iterdir()] == [models.STAMP]

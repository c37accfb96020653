"""The table of internals is complete, and what it says when vLLM is another one."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.contract.accelerators import ACCELERATORS
from tests.contract.checker import parse_member
from tests.contract.rooms import COMPAT, ROOMS
from tests.contract.source import SourceTree
from vllm_pd import vllm_compat as compat
from vllm_pd.errors import UnsupportedVLLMError
from vllm_pd.vllm_compat import INTERNALS
from vllm_pd.vllm_compat.internal import Internal
from vllm_pd.vllm_compat.version import version_warning, vllm_version

OURS = SourceTree(ROOMS)
BY_ALIAS = {entry.alias: entry for entry in INTERNALS}


def used_members(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(alias, member) for each `Alias.member` and `compat.Alias.member` in a module; a member "" is the alias alone."""
    local: dict[str, str] = {}
    modules: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for name in node.names:
                if node.module == COMPAT and name.name in BY_ALIAS:
                    local[name.asname or name.name] = name.name
                    yield name.name, ""
                elif f"{node.module}.{name.name}" == COMPAT:
                    modules.add(name.asname or name.name)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        owner = node.value
        if isinstance(owner, ast.Name) and owner.id in modules and node.attr in BY_ALIAS:
            yield node.attr, ""
        elif isinstance(owner, ast.Name) and owner.id in local:
            yield local[owner.id], node.attr
        elif isinstance(owner, ast.Attribute) and isinstance(owner.value, ast.Name) and owner.value.id in modules:
            yield owner.attr, node.attr


USED = {use for room in ROOMS for module in OURS.modules(room) for use in used_members(OURS.tree_of(module))}


def test_every_member_that_our_code_names_is_in_the_table() -> None:
    missing = []
    for alias, member in USED:
        entry = BY_ALIAS.get(alias)
        also = ACCELERATORS if alias == "current_platform" else ()
        listed = {parse_member(text)[0] for e in (entry, *also) if e for text in e.members}
        if entry and member and not member.startswith("__") and member not in listed and not hasattr(dict, member):
            missing.append(f"{alias}.{member}")
    assert sorted(missing) == []


def test_aliases_are_unique_and_every_member_is_well_written() -> None:
    assert len(BY_ALIAS) == len(INTERNALS)
    for entry in INTERNALS:
        assert entry.why
        assert len({parse_member(text)[0] for text in entry.members}) == len(entry.members)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.4", "0.33.0", "0.33.1rc1", "0.32.0+cpu", "0.33.0+cu129", "0.33"])
def test_supported_version_gives_no_warning(version: str) -> None:
    assert version_warning(version) is None


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "0.34.0.dev12+g1234567", "0.3.2", "1.32.0", "0.320.0", ""])
def test_other_version_gives_one_sentence_that_names_the_supported_ones(version: str) -> None:
    sentence = version_warning(version)
    assert sentence is not None
    assert "0.32 or 0.33" in sentence
    assert version in sentence
    assert sentence.count(". ") == 0
    assert sentence.endswith(".")


@pytest.mark.vllm
@pytest.mark.parametrize(("module", "name"), [("vllm.envs", "NoSuchThing"), ("vllm.no_such_module", "Anything")])
def test_internal_that_vllm_lacks_is_named_with_the_supported_versions(
    monkeypatch: pytest.MonkeyPatch, module: str, name: str
) -> None:
    pytest.importorskip("vllm")
    entry = Internal("Gone", module, name, (), "the test asks for it")
    monkeypatch.setitem(compat._BY_ALIAS, "Gone", entry)
    with pytest.raises(UnsupportedVLLMError) as raised:
        _ = compat.Gone
    assert str(raised.value) == (
        f"vLLM {vllm_version()} has no {module}.{name}, which vllm-pd needs (the test asks for it); "
        "install vLLM 0.32 or 0.33."
    )


def test_name_outside_the_table_is_an_ordinary_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = compat.Nothing

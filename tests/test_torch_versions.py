"""What smp uses of PyTorch: versions, and names that PyTorch does not promise to keep."""

import ast
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from smp import torch_versions

ROOT = Path(__file__).parents[1]
# Of Python's own modules, of transformers', and of smp's own attributes that setattr() makes.
OTHERS = {"_DummyThread", "_current_frames", "_exit", "_getframe", "_reconstruct", "_slotnames"}
# Attributes of objects that this Python makes: torch.amp.GradScaler's, a state_dict's, a
# compiled function's.
OF_OBJECTS = {"_scale", "_metadata", "_torchdynamo_disable", "_torchdynamo_disable_msg"}
# Looked for, and done without where it is missing.
OPTIONAL = {"_FrameAction", "_FrameExecStrategy"}


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith(("__", "_smp"))


def _chain(node: ast.AST) -> list[str]:
    """``a.b.c`` as its names; empty for what is no such chain."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return [node.id, *names] if isinstance(node, ast.Name) else []


def _used(tree: ast.AST) -> set[str]:
    """Names that a file of smp takes from an object or a module, and that are not its own."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            found.add(node.attr)
        if isinstance(node, ast.Attribute) and (chain := _chain(node))[:1] == ["torch"]:
            found |= {chain[-1]} if any(map(_is_private, chain)) else set()
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("torch"):
            places = str(node.module).split(".")
            found |= {n.name for n in node.names if any(map(_is_private, [*places, n.name]))}
    return found


def _defined(tree: ast.AST) -> set[str]:
    """Names of functions and classes, and of what is assigned to."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if _chain(node.value) in (["self"], ["cls"]) else set()
    return found


def _owner(path: str) -> Any:
    """The module, class or operator that a dotted path names."""
    found: Any = torch
    for name in path.split(".")[1:]:
        found = getattr(found, name, None) or import_module(path)
    return found


def test_every_private_name_of_torch_is_listed():
    trees = [ast.parse(path.read_text()) for path in (ROOT / "smp").rglob("*.py")]
    own = set().union(*map(_defined, trees))
    listed = {name for names in torch_versions.PRIVATE.values() for name in names}
    parts = {part for owner in torch_versions.PRIVATE for part in owner.split(".")}
    used = set().union(*map(_used, trees))
    assert used - own - listed - parts - OTHERS - OF_OBJECTS - OPTIONAL == set()
    text = "".join(path.read_text() for path in (ROOT / "csrc" / "python").rglob("*.c"))
    strings = {
        node.value
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert {n for n in listed - used - strings if f'"{n}"' not in text} == set()


@pytest.mark.parametrize("owner", torch_versions.PRIVATE)
def test_this_torch_has_what_smp_uses(owner):
    found = _owner(owner)
    stated = getattr(found, "__annotations__", {})  # of attributes that an instance has
    missing = {n for n in torch_versions.PRIVATE[owner] if n not in stated}
    assert {n for n in missing if not hasattr(found, n)} == set()


def test_the_oldest_version_is_the_same_everywhere():
    oldest = ".".join(map(str, torch_versions.OLDEST))
    for file in ("pyproject.toml", "docs/quickstart.md", "README.md"):
        said = re.findall(r"(?:torch>=|PyTorch )(\d+\.\d+)", (ROOT / file).read_text())
        assert oldest in said, file
    major, minor = torch_versions.OLDEST
    assert f"< ({major}, {minor})" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("version", ["2.9.1", "1.13.0a0", "2.10.0", "2.15.0+cu130", "3.0"])
def test_an_older_torch_is_refused_in_a_sentence(version):
    if version in ("2.10.0", "2.15.0+cu130", "3.0"):
        torch_versions.refuse_older(version)
        return
    with pytest.raises(ImportError, match=rf"needs PyTorch 2\.10 or newer, .*{version}: pip"):
        torch_versions.refuse_older(version)

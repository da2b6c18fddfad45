"""Packages do not use each other's attributes that begin with `_`."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import gtopk

ROOT = Path(gtopk.__file__).parent.parent
SOURCES = sorted(path for top in ("gtopk", "collectives") for path in (ROOT / top).rglob("*.py"))
TORCHS = {name for kind in (torch.Tensor, torch.optim.Optimizer) for name in dir(kind)}


def package(path: Path) -> str:
    """Return the package of a file, up to two names; a module next to packages is its own."""
    return "/".join(path.relative_to(ROOT).parts[:2])


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def defined(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def used(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and not is_own(node):
            yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, each.name) for each in node.names if is_private(each.name))


def violations(sources: dict[Path, str]) -> list[str]:
    trees = {path: ast.parse(text) for path, text in sources.items()}
    packages: dict[str, set[str]] = defaultdict(set)
    for path, tree in trees.items():
        for name in defined(tree):
            packages[name].add(package(path))
    return [
        f"{path.relative_to(ROOT)}:{line} uses {name} of {', '.join(sorted(packages[name]))}"
        for path, tree in trees.items()
        for line, name in used(tree)
        if packages[name]
        and package(path) not in packages[name]
        and name not in TORCHS | {"_version"}
    ]


def test_no_package_uses_private_names_of_another() -> None:
    assert violations({path: path.read_text() for path in SOURCES}) == []


@pytest.mark.parametrize(
    ("text", "is_violation"),
    [
        ("optimizer._own_secret", True),
        ("from gtopk.optim.one import _own_secret", True),
        ("self._own_secret", False),
        ("tensor._version", False),
    ],
)
def test_violations_are_found(text: str, is_violation: bool) -> None:
    one, other = ROOT / "gtopk" / "optim" / "one.py", ROOT / "gtopk" / "adaptive" / "other.py"
    found_violations = violations({one: "class A:\n    def _own_secret(self): ...\n", other: text})
    assert found_violations == (
        ["gtopk/adaptive/other.py:1 uses _own_secret of gtopk/optim"] if is_violation else []
    )

"""Every environment variable that the code knows is on the page of settings, and no other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "settings.md").read_text(encoding="utf-8")
NAME = re.compile(r"(?:GTOPK|HOROVOD)_[A-Z_]+")
NOT_SETTINGS = {"GTOPK_SOURCES"}  # a symbol of the C++ core


def names_in_code() -> set[str]:
    found = set()
    for package in ("collectives", "gtopk"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found |= {node.value} & set(NAME.findall(node.value))
    return found - NOT_SETTINGS


def test_the_page_has_every_setting_of_the_code_and_no_other() -> None:
    assert set(NAME.findall(PAGE)) == names_in_code() | {"GTOPK_ALLOW_PICKLE"}

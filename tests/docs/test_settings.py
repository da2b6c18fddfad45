"""The page of settings is made from the table, and has what launchers set besides."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from docs.make import settings

ROOT = Path(__file__).parents[2]
PAGE = settings.PAGE.read_text(encoding="utf-8")
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
    assert set(NAME.findall(PAGE)) == names_in_code()


def test_the_page_is_made_from_the_table() -> None:
    assert settings.with_tables(PAGE) == PAGE, "make it: python docs/make/settings.py"

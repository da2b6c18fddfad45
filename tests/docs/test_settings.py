"""The settings page is generated from the table, and has every setting of the code."""

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


def test_settings_page_has_exactly_the_settings_of_the_code() -> None:
    assert set(NAME.findall(PAGE)) == names_in_code()


def test_settings_page_is_up_to_date_with_its_table() -> None:
    assert settings.with_tables(PAGE) == PAGE, "make it: python docs/make/settings.py"

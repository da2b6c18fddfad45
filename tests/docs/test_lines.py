"""The lines of the docs' sources are not too long."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LONGEST = 140


def long_lines(page: str) -> Iterator[int]:
    """Return which lines are too long, but for tables, pictures, code, and targets of links."""
    inside = False
    for number, line in enumerate(page.splitlines(), 1):
        if line.lstrip().startswith("```"):
            inside = not inside
        elif not inside and not line.lstrip().startswith(("|", "![")):
            words = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "", line))
            if len(words) > LONGEST:
                yield number


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_docs_line_is_too_long(page: Path) -> None:
    assert list(long_lines(page.read_text(encoding="utf-8"))) == []


def test_line_check_notices_long_prose_lines_only() -> None:
    long = "word " * 29
    page = f"{long}\n| {long} |\n```\n{long}\n```\n`{long}` [a](b/{'c' * 140})\nshort\n{long}\n"
    assert list(long_lines(page)) == [1, 8]

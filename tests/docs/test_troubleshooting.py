"""The messages on the page of troubles are those that the code says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
MESSAGES = [
    message
    for line in PAGE.splitlines()
    if line.startswith("**`")
    for message in re.findall(r"\*\*`(.*?)`\*\*", line)
]


def texts(source: str) -> list[str]:
    """Return a file's strings; what is put into them is "…"."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
            found.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(re.sub(r"%[-.\d]*[sdg]", "…", node.value))
    return [" ".join(text.split()) for text in found]


SAID = [
    text
    for folder in ("gtopk", "collectives")
    for path in sorted((ROOT / folder).rglob("*.py"))
    for text in texts(path.read_text(encoding="utf-8"))
]


def is_said(message: str) -> bool:
    """Tell whether each part of it between two "…" is in some text."""
    parts = [part.strip(" :;,") for part in message.split("…")]
    return all(any(part in text for text in SAID) for part in parts if len(part) > 3)


def test_there_are_many() -> None:
    assert len(MESSAGES) >= 20


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_is_one_of_the_codes(message: str) -> None:
    assert is_said(message)


def test_what_nobody_says_is_noticed() -> None:
    assert not is_said("rank … has had enough of it")

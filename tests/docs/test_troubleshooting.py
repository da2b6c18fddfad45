"""The messages on the troubleshooting page occur in the code."""

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


TEXTS_OF_CODE = [
    text
    for folder in ("gtopk", "collectives")
    for path in sorted((ROOT / folder).rglob("*.py"))
    for text in texts(path.read_text(encoding="utf-8"))
]


def occurs_in_code(message: str) -> bool:
    """Tell whether each part between two "…" is in some text of the code."""
    parts = [part.strip(" :;,") for part in message.split("…")]
    return all(any(part in text for text in TEXTS_OF_CODE) for part in parts if len(part) > 3)


def test_troubleshooting_page_has_at_least_20_messages() -> None:
    assert len(MESSAGES) >= 20


@pytest.mark.parametrize("message", MESSAGES)
def test_troubleshooting_message_occurs_in_the_code(message: str) -> None:
    assert occurs_in_code(message)


def test_message_check_notices_a_message_missing_in_the_code() -> None:
    assert not occurs_in_code("rank … has had enough of it")

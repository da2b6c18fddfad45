"""Blocks: the fenced parts of a page, in order, and the text between them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

_FENCED: Final = re.compile(
    r'^```(?P<language>\w*)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$',
    re.DOTALL | re.MULTILINE,
)
PROSE: Final = "prose"


class Block(NamedTuple):
    """A part of a page.

    language: "python", "bash", "text", ...; "" for a fence without one, PROSE for what is in none.
    title:    the file that the text is, "" for none.
    """

    language: str
    title: str
    text: str


def blocks(page: str) -> Iterator[Block]:
    """Return the parts of a page's Markdown, whitespace alone left out."""
    end = 0
    for fence in _FENCED.finditer(page):
        if before := page[end : fence.start()].strip():
            yield Block(PROSE, "", before)
        yield Block(fence["language"], fence["title"] or "", fence["text"])
        end = fence.end()
    if rest := page[end:].strip():
        yield Block(PROSE, "", rest)


def commands(block: Block) -> str:
    """Return a bash block without what installs: who runs it has done that."""
    lines = block.text.splitlines()
    return "\n".join(line for line in lines if not line.startswith("pip install")) + "\n"

"""The page that reports share: one HTML file that needs no network, no script and no other file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from html import escape
from importlib.resources import files
from typing import Final


def prose(words: str) -> str:
    """Return words as HTML that no line break tears "top-" from "k" in."""
    return re.sub("g?[Tt]op-k", r'<span class="whole">\g<0></span>', escape(words))


POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"  # load, run nothing


def page(title: str, own_style: str, body: str) -> str:
    """Return the whole page; own_style: CSS for what the shared style does not know."""
    style = (files(__package__) / "page.css").read_text(encoding="utf-8")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>
{style}
{own_style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def facts(entries: Mapping[str, str]) -> str:
    """Return names and values in a list."""
    return "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in entries.items()
    )


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Return what each drawn key stands for."""
    items = "".join(f"<li>{drawn}{escape(words)}</li>" for drawn, words in entries)
    return f'<ul class="legend">{items}</ul>'

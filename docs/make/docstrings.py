"""An extension of Sphinx: docstrings as they are written here, laid out for the reference.

    density: of every bucket;           a list: density, and what it is
        more of it                ->
        what -> how                     a drawing, indented after an empty line, as it is

Words in `backquotes` are code; nothing else in a sentence means more than it says.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

_NAMED: Final = re.compile(
    r"(?P<names>\*{0,2}[A-Za-z_]\w*(?:, \*{0,2}[A-Za-z_]\w*)*):\s+(?P<text>.+)"
)


def as_rst(lines: list[str]) -> list[str]:
    """Return a docstring's lines as reStructuredText."""
    return list(_lines(lines))


def _lines(lines: list[str]) -> Iterator[str]:
    naming = drawing = False  # what the line before belongs to
    before = ""
    for line in lines:
        named = _NAMED.fullmatch(line)
        if drawing and (line.startswith(" ") or not line.strip()):
            yield line
        elif named and (naming or not before.strip()):
            names = ", ".join(f"``{name}``" for name in named["names"].split(", "))
            yield from (names, f"    {_escaped(named['text'])}")
            naming, drawing = True, False
        elif naming and line.startswith(" "):
            yield f"    {_escaped(line.strip())}"
        elif line.startswith("    ") and not before.strip():
            yield from ("::", "", line)
            naming, drawing = False, True
        else:
            if (naming or drawing) and line.strip():
                yield ""
            if line.strip():
                naming = drawing = False
            yield _escaped(line)
        before = line


def _escaped(text: str) -> str:
    parts = text.split("`")
    if len(parts) % 2 == 0:  # a backquote that ends nowhere
        return _plain(text.replace("`", "'"))
    return "".join(f"``{part}``" if odd % 2 else _plain(part) for odd, part in enumerate(parts))


def _plain(text: str) -> str:
    return re.sub(r"([\\*|_])", r"\\\1", text)


def setup(app: Any) -> dict[str, Any]:
    """Have Sphinx rewrite every docstring before it reads it."""

    def rewrite(
        app: Any, what: str, name: str, obj: object, options: object, lines: list[str]
    ) -> None:
        lines[:] = as_rst(lines)

    app.setup_extension("sphinx.ext.autodoc")
    app.connect("autodoc-process-docstring", rewrite)
    return {"parallel_read_safe": True}

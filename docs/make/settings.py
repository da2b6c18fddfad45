"""The tables of docs/reference/settings.md: `python docs/make/settings.py` writes them there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(FOLDER.parent))

from gtopk.settings import SECTIONS  # noqa: E402 - found by the line above

PAGE: Final = FOLDER / "reference" / "settings.md"
BEGIN: Final = "<!-- Made from gtopk/settings.py by docs/make/settings.py. -->\n"
END: Final = "<!-- End of what is made. -->\n"


def tables() -> str:
    """Return a heading and a table for each section."""
    parts = []
    for heading, section in SECTIONS.items():
        rows = [f"| `{each.name}` | {each.shown} | {each.about} |" for each in section]
        parts.append(
            "\n".join([f"## {heading}", "", "| variable | default | |", "|---|---|---|", *rows])
        )
    return "\n\n".join(parts) + "\n"


def with_tables(page: str) -> str:
    """Return the page with the tables in their place; raise ValueError where it has none."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE} must have the lines {BEGIN!r} and {END!r}")
    return f"{before}{begin}\n{tables()}\n{end}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

"""The tutorial as a notebook: `python docs/make/notebook.py` writes it from tutorial.md."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(FOLDER.parent))

from docs.make.blocks import PROSE, Block, blocks, commands  # noqa: E402 - found by the line above

PAGE: Final = FOLDER / "tutorial.md"
NOTEBOOK: Final = FOLDER / "tutorial.ipynb"

_BEGIN: Final = """\
# What this notebook writes goes into a folder of its own.
import os
import tempfile

os.chdir(tempfile.mkdtemp())
"""


_PRINTED: Final = ("text", "console")


def notebook(page: str) -> str:
    """Return the notebook, as its file has it: prose, files written, commands run.

    What the page shows after a command, as what it prints, is the output of its cell.
    """
    cells = [_cell("code", _BEGIN, 0)]
    before = ""
    for number, block in enumerate(blocks(page), 1):
        if before == "bash" and block.language in _PRINTED:
            cells[-1]["outputs"] = [_printed(block.text)]
        else:
            cells.append(_cell(*_content(block), number))
        before = block.language
    made = {
        "cells": cells,
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"


def _printed(text: str) -> dict[str, Any]:
    """Return what a cell has printed."""
    lines = text.splitlines(keepends=True)
    return {"name": "stdout", "output_type": "stream", "text": lines}


def _content(block: Block) -> tuple[str, str]:
    """Return the kind of a cell and its text."""
    if block.language == PROSE:
        return "markdown", block.text
    if block.language == "python" and block.title:
        return "code", f"%%writefile {block.title}\n{block.text}"
    if block.language == "bash":
        return "code", f"%%bash\nset -e\n{commands(block)}"
    return "markdown", f"```{block.language}\n{block.text}```"


def _cell(kind: str, text: str, number: int) -> dict[str, Any]:
    cell: dict[str, Any] = {
        "cell_type": kind,
        "id": f"cell-{number}",
        "metadata": {},
        "source": text.rstrip("\n").splitlines(keepends=True),
    }
    return cell | ({"execution_count": None, "outputs": []} if kind == "code" else {})


if __name__ == "__main__":
    NOTEBOOK.write_text(notebook(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

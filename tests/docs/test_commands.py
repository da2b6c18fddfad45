"""What the extensions put into pages: the commands' own help, and the names of files."""

from __future__ import annotations

from docs.make.commands import with_help
from docs.make.titles import with_captions


def test_a_mark_becomes_what_the_command_prints() -> None:
    page = with_help("# Plan\n\n<!-- gtopk plan --help -->\n\nMore.")
    assert page.startswith("# Plan\n\n```text\nusage: gtopk plan ")
    assert page.endswith("\n```\n\nMore.")


def test_a_file_is_shown_with_its_name() -> None:
    page = '```python title="a.py"\nb = 1\n```\n```python\nc\n```'
    shown = "```{code-block} python\n:caption: a.py\n\nb = 1\n```\n```python\nc\n```"
    assert with_captions(page) == shown

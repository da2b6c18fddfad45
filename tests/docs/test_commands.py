"""The docs extensions insert the commands' help and the names of files."""

from __future__ import annotations

from docs.make.commands import with_help
from docs.make.titles import with_captions


def test_help_marker_is_replaced_by_the_commands_output() -> None:
    page = with_help("# Plan\n\n<!-- gtopk plan --help -->\n\nMore.")
    assert page.startswith("# Plan\n\n```text\nusage: gtopk plan ")
    assert page.endswith("\n```\n\nMore.")


def test_code_block_title_becomes_a_caption() -> None:
    page = '```python title="a.py"\nb = 1\n```\n```python\nc\n```'
    shown = "```{code-block} python\n:caption: a.py\n\nb = 1\n```\n```python\nc\n```"
    assert with_captions(page) == shown

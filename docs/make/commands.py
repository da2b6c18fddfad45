"""An extension of Sphinx: `<!-- gtopk plan --help -->` in a page becomes what that prints."""

from __future__ import annotations

import contextlib
import io
import os
import re
from typing import Any, Final
from unittest.mock import patch

_MARK: Final = re.compile(r"<!-- gtopk(?P<words>(?: [\w-]+)*) --help -->")
_COLUMNS: Final = "84"


def help_of(*words: str) -> str:
    """Return what `gtopk WORDS --help` prints."""
    from gtopk.cli import main

    printed = io.StringIO()
    with (
        patch.dict(os.environ, COLUMNS=_COLUMNS),
        contextlib.redirect_stdout(printed),
        contextlib.suppress(SystemExit),
    ):
        main([*words, "--help"])
    return printed.getvalue().rstrip()


def with_help(page: str) -> str:
    """Return a page with the commands' help in its places."""

    def shown(mark: re.Match[str]) -> str:
        return f"```text\n{help_of(*mark['words'].split())}\n```"

    return _MARK.sub(shown, page)


def setup(app: Any) -> dict[str, Any]:
    """Have Sphinx look for the marks in every page."""

    def replace(app: Any, page: str, source: list[str]) -> None:
        source[:] = [with_help(text) for text in source]

    app.connect("source-read", replace)
    return {"parallel_read_safe": True}

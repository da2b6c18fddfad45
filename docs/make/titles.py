"""An extension of Sphinx: a block with a title, that is a file, is shown with its name."""

from __future__ import annotations

import re
from typing import Any, Final

_TITLED: Final = re.compile(r'^```(?P<language>\w+) title="(?P<title>[^"]+)"$', re.MULTILINE)


def with_captions(page: str) -> str:
    """Return a page whose files are blocks with a caption, as MyST writes them."""
    return _TITLED.sub(r"```{code-block} \g<language>\n:caption: \g<title>\n", page)


def setup(app: Any) -> dict[str, Any]:
    """Have Sphinx look for files in every page."""

    def replace(app: Any, page: str, source: list[str]) -> None:
        source[:] = [with_captions(text) for text in source]

    app.connect("source-read", replace)
    return {"parallel_read_safe": True}

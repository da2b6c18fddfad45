"""Turn plain words into HTML."""

from __future__ import annotations

import re
from html import escape


def prose(words: str) -> str:
    """Return words as HTML that no line break tears "top-" from "k" in."""
    return re.sub("g?[Tt]op-k", r'<span class="whole">\g<0></span>', escape(words))

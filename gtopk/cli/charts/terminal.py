"""What a terminal is shown: colours where somebody looks, and asked for none."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TextIO


def wants_colour(stream: TextIO, environ: Mapping[str, str] = os.environ) -> bool:
    """Tell whether to write colours: to a terminal, unless NO_COLOR says no (no-color.org)."""
    return stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"

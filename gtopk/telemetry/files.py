"""The record as a file of lines."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from .lines import Line, as_text


class LineFile:
    """Appends lines to a file; each call is one write, so that readers see whole lines."""

    name = "the record"

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        length = os.fstat(self._file).st_size
        if length and os.pread(self._file, 1, length - 1) != b"\n":
            os.write(self._file, b"\n")  # whoever wrote here before was killed in a line

    def take(self, lines: Sequence[Line]) -> None:
        """Write lines."""
        content = memoryview("".join(map(as_text, lines)).encode())
        while content:
            content = content[os.write(self._file, content) :]

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

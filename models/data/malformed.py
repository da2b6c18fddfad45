"""The error for a malformed file, with file, place and reason."""

from __future__ import annotations

from pathlib import Path


class MalformedFile(ValueError):
    """Raised for a file that does not have the expected format.

    line: counted from 1; byte: counted from 0. None if that does not tell the place of the defect.
    """

    def __init__(self, path: Path, line: int | None, reason: str, *, byte: int | None = None):
        where = f"{path}"
        if line is not None:
            where += f", line {line}"
        if byte is not None:
            where += f", byte {byte}"
        super().__init__(f"{where}: {reason}")
        self.path, self.line, self.byte, self.reason = path, line, byte, reason

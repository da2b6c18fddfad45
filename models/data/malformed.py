"""The error that a file is which is not what it must be: file, place and reason."""

from __future__ import annotations

from pathlib import Path


class MalformedFile(ValueError):
    """A file that is not what it must be.

    line: counted from 1; None where the file as a whole is wrong, or its place is a byte.
    byte: counted from 0; None where the place is a line, or none.
    """

    def __init__(self, path: Path, line: int | None, reason: str, *, byte: int | None = None):
        where = f"{path}"
        if line is not None:
            where += f", line {line}"
        if byte is not None:
            where += f", byte {byte}"
        super().__init__(f"{where}: {reason}")
        self.path, self.line, self.byte, self.reason = path, line, byte, reason

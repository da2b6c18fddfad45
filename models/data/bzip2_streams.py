"""Bzip2 files with several streams in a row, as pbzip2, lbzip2 and `cat` make them.

Python's own bz2.BZ2File takes undecodable bytes after a whole stream for the end of the file.
"""

from __future__ import annotations

import bz2
import io
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class Bzip2Streams(io.RawIOBase):
    """The content of all streams of a file; EOFError or OSError for bytes outside of a stream."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._stream = bz2.BZ2Decompressor()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer)
        unpacked = b""
        while not unpacked:  # an empty stream is not the end
            packed = b""
            if self._stream.eof:
                packed = self._stream.unused_data or self._file.read(io.DEFAULT_BUFFER_SIZE)
                if not packed:
                    return 0
                self._stream = bz2.BZ2Decompressor()
            elif self._stream.needs_input:
                packed = self._file.read(io.DEFAULT_BUFFER_SIZE)
                if not packed:
                    raise EOFError("it ends within a stream")
            unpacked = self._stream.decompress(packed, len(view))
        view[: len(unpacked)] = unpacked
        return len(unpacked)

    def close(self) -> None:
        self._file.close()
        super().close()


def open_bzip2(path: Path) -> io.BufferedReader:
    """Open a file to read its unpacked content."""
    return io.BufferedReader(Bzip2Streams(path))

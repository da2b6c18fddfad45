"""Reads files of sparse rows, plain or packed, in blocks of whole lines; errors name the line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from .malformed import MalformedFile
from .packing import DAMAGED, open_unpacked
from .rows import LabelledRows, concatenated
from .text_block import BadLine, parse_block
from .text_line import Layout

BLOCK_BYTES: Final = 1 << 20  # larger => beyond the CPU's cache; smaller => more calls
MOST_LINE_BYTES: Final = 1 << 26
EMPTY: Final = "is empty"


class TextFile:
    """A file: read its first lines one by one, then all rows that are left."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._blocks = _blocks(path)
        self._kept = b""
        self._lines = 0  # lines returned so far

    def first_line(self) -> bytes:
        """Return the next line without its end; raise MalformedFile for an empty file."""
        self._kept = self._kept or next(self._blocks, b"")
        if not self._kept and not self._lines:
            raise MalformedFile(self.path, None, EMPTY)
        line, _, self._kept = self._kept.partition(b"\n")
        self._lines += 1
        return line

    def refuse(self, reason: str) -> MalformedFile:
        """Return the error, with this reason, for the line returned last."""
        return MalformedFile(self.path, self._lines, reason)

    def rows(self, layout: Layout, count: int | None = None) -> LabelledRows:
        """Return the rows that are left, which must be `count` if it is given."""
        blocks = [parse_block(b"", layout)]
        begin = self._lines
        for text in self._rest():
            try:
                blocks.append(parse_block(text, layout))
            except BadLine as error:
                # An extra line is reported as such, even if it is malformed.
                if count is None or self._lines + error.line < begin + count:
                    line = self._lines + error.line + 1
                    raise MalformedFile(self.path, line, str(error)) from error
                self._lines += error.line + 1
            else:
                self._lines += len(blocks[-1])
            if count is not None and self._lines - begin > count:
                raise MalformedFile(
                    self.path, begin + count + 1, f"a row more than the {count} of the header"
                )
        if count is not None and self._lines - begin < count:
            raise MalformedFile(
                self.path,
                None,
                f"ends after {self._lines - begin} rows where its header says {count}",
            )
        if not self._lines:
            raise MalformedFile(self.path, None, EMPTY)
        return concatenated(blocks, self.path.name)

    def _rest(self) -> Iterator[bytes]:
        if self._kept:
            yield self._kept
        self._kept = b""
        yield from self._blocks


def _blocks(path: Path) -> Iterator[bytes]:
    """Yield blocks of whole lines, each ending in a newline, whichever line ends the file has."""
    opened, packed_by = open_unpacked(path)
    lines = 0
    with opened as file:
        kept = [b""]
        try:
            while read := file.read(BLOCK_BYTES):
                whole, newline, rest = read.rpartition(b"\n")
                if newline:
                    block = b"".join([*kept, whole, newline]).replace(b"\r\n", b"\n")
                    lines += block.count(b"\n")
                    yield block
                    kept = [rest]
                else:
                    kept.append(rest)
                if len(kept) > MOST_LINE_BYTES // BLOCK_BYTES:
                    reason = f"longer than {MOST_LINE_BYTES} bytes"
                    raise MalformedFile(path, lines + 1, reason)
        except DAMAGED as error:
            if packed_by is None:
                raise
            reason = f"the {packed_by} file is truncated or damaged: {error}"
            raise MalformedFile(path, lines + 1, reason) from error
        if last := b"".join(kept):
            yield (last + b"\n").replace(b"\r\n", b"\n")

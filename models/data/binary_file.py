"""Files of bytes, plain or packed: as many as were announced are read, and no more."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from .malformed import MalformedFile
from .packing import DAMAGED, open_unpacked

_PIECE_BYTES: Final = 1 << 20


class BinaryFile:
    """A file, read from its begin; plain or packed, told by its first bytes (`packing`).

    What it ends too soon with, or is damaged in, is MalformedFile.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.place = 0  # in what it unpacks to
        self._file, self._packed_by = open_unpacked(path)

    def __enter__(self) -> BinaryFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, count: int, what: str) -> bytes:
        """Return the next bytes, all of them; `what` they are is said where they are not there.

        A count larger than a plain file is refused before there is room made for it.
        """
        size = self.path.stat().st_size
        if not size:
            raise self.refuse("is empty")
        if self._packed_by is None and self.place + count > size:
            raise self.refuse(f"has {size} bytes where {what} should end at {self.place + count}")
        content = self._read(count)
        if count and not content and not self.place:
            raise self.refuse("is empty")
        if len(content) < count:
            raise self.refuse(f"ends after {len(content)} of the {count} bytes of {what}")
        self.place += count
        return content

    def end(self) -> None:
        """Raise MalformedFile where there is more."""
        if self._read(1):
            raise self.refuse("the file must end here, and goes on")

    def refuse(self, reason: str) -> MalformedFile:
        """Return the error that what comes now is."""
        return MalformedFile(self.path, None, reason, byte=self.place)

    def _read(self, count: int) -> bytes:
        # Piece by piece: what a few packed bytes announce is no reason to make room for it.
        pieces, left = [], count
        try:
            while left and (piece := self._file.read(min(left, _PIECE_BYTES))):
                pieces.append(piece)
                left -= len(piece)
            return b"".join(pieces)
        except DAMAGED as error:
            if self._packed_by is None:
                raise
            reason = f"the {self._packed_by} file is truncated or damaged: {error}"
            raise self.refuse(reason) from error

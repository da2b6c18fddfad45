"""Binary files, plain or packed, of which exactly the announced number of bytes is read."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from .malformed import MalformedFile
from .packing import DAMAGED, open_unpacked

_PIECE_BYTES: Final = 1 << 20


class BinaryFile:
    """A file, read from its begin; its first bytes tell whether it is packed (`packing`).

    Reading raises MalformedFile where it ends too soon or is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.place = 0  # in the unpacked bytes
        self._file, self._packed_by = open_unpacked(path)

    def __enter__(self) -> BinaryFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, count: int, what: str) -> bytes:
        """Return the next `count` bytes; if some are missing, the error names `what` they are.

        A count larger than a plain file is refused before memory is reserved for it.
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
        """Raise MalformedFile unless the file ends here."""
        if self._read(1):
            raise self.refuse("the file must end here, and goes on")

    def refuse(self, reason: str) -> MalformedFile:
        """Return the error, with this reason, for the bytes at the current place."""
        return MalformedFile(self.path, None, reason, byte=self.place)

    def _read(self, count: int) -> bytes:
        # Piece by piece: a few packed bytes may announce any size, for which no memory is reserved.
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

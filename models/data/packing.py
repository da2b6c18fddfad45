"""Packed files: gzip, bzip2 and xz, known by their first bytes; other packings are refused."""

from __future__ import annotations

import gzip
import lzma
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, Final, cast

from .bzip2_streams import open_bzip2
from .malformed import MalformedFile

_READ: Final[Mapping[bytes, tuple[str, Callable[[Path], Any]]]] = {
    b"\x1f\x8b": ("gzip", gzip.GzipFile),
    b"BZ": ("bzip2", open_bzip2),
    b"\xfd7zXZ\x00": ("xz", lzma.LZMAFile),
}
_REFUSED: Final[Mapping[bytes, tuple[str, str]]] = {
    b"PK\x03\x04": ("a zip archive", "unzip"),
    b"PK\x05\x06": ("a zip archive without a file in it", "unzip"),
    b"\x28\xb5\x2f\xfd": ("packed by zstd", "unzstd"),
    b"7z\xbc\xaf\x27\x1c": ("a 7z archive", "7z x"),
}
_LONGEST: Final = 6

# Errors raised for a truncated or damaged packed file; gzip's own is an OSError.
DAMAGED: Final = (EOFError, zlib.error, lzma.LZMAError, OSError)


def open_unpacked(path: Path) -> tuple[IO[bytes], str | None]:
    """Open a file to read its unpacked content; also return its packing, None for a plain file.

    Raises MalformedFile for an unsupported packing, OSError.
    """
    with path.open("rb") as file:
        first = file.read(_LONGEST)
    for magic, (what, program) in _REFUSED.items():
        if first.startswith(magic):
            raise MalformedFile(path, None, f"is {what}: unpack it first ({program} {path.name})")
    for magic, (name, opener) in _READ.items():
        if first.startswith(magic):
            return cast(IO[bytes], opener(path)), name
    return path.open("rb"), None

"""Files of commits: written beside, synced to the disk, and renamed when they are whole.

    commit-00000042-of-3.all      what is the same on every rank, by rank 0
    commit-00000042-of-3.rank-0   what is a rank's own: residuals
    commit-00000042-of-3.rank-1
    commit-00000042-of-3.rank-2   with the last of these four, commit 42 of 3 ranks is whole

A file is one object as gtopk.objects encodes it: typed msgpack under a checksum.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from ...objects import decode

ALL: Final = "all"
_NAME: Final = re.compile(r"commit-(\d+)-of-(\d+)\.(all|rank-\d+)")
_BESIDE: Final = ".part"  # of a file that is being written


class File(NamedTuple):
    """One file of a commit that `ranks` ranks made; part: "all", or as `part_of` says."""

    number: int
    ranks: int
    part: str

    @property
    def name(self) -> str:
        return f"commit-{self.number:08d}-of-{self.ranks}.{self.part}"


def part_of(rank: int) -> str:
    """Return the part of a commit that is a rank's own."""
    return f"rank-{rank}"


def parts_of(ranks: int) -> list[str]:
    """Return the parts of a whole commit."""
    return [ALL, *map(part_of, range(ranks))]


def list_files(folder: Path) -> list[File]:
    """Return the files of commits in a folder."""
    return [file for path in folder.iterdir() if (file := _file_at(path.name))]


def _file_at(name: str) -> File | None:
    match = _NAME.fullmatch(name)
    return match and File(int(match[1]), int(match[2]), match[3])


def write_file(folder: Path, file: File, content: bytes) -> None:
    """Write a file that is there whole or not at all, whatever ends this process or the machine."""
    beside = folder / (file.name + _BESIDE)
    with open(beside, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(beside, folder / file.name)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_file(folder: Path, file: File) -> Any:
    """Return the object in a file; raise OSError, or ObjectFormatError when it is damaged."""
    return decode((folder / file.name).read_bytes())


def remove_files(folder: Path, unwanted: Callable[[File], bool]) -> None:
    """Remove files that are unwanted, also those that were never finished."""
    for path, file in list(_all_files(folder)):
        if unwanted(file):
            with suppress(FileNotFoundError):
                path.unlink()


def _all_files(folder: Path) -> Iterator[tuple[Path, File]]:
    for path in folder.iterdir():
        if file := _file_at(path.name.removesuffix(_BESIDE)):
            yield path, file

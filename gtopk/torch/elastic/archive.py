"""Archive: the commits of a job on disk, in the folder that GTOPK_ELASTIC_DIR names.

All ranks write a commit together, and know when it is whole on the disk. A job that starts with the
folder of one that ended goes on from the newest commit that is whole, on as many ranks as it has.
The folder may be one that all hosts share, or each host's own.
"""

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from collectives.transports.transport import say

from ... import world
from ...objects import ObjectFormatError, encode
from ..functions import allgather_object, broadcast_object
from ..mpi_ops import rank, size
from .files import ALL, File, list_files, part_of, parts_of, read_file, remove_files, write_file

FOLDER: Final = "GTOPK_ELASTIC_DIR"
KEEP: Final = "GTOPK_ELASTIC_KEEP"
ADVICE: Final = f"with {FOLDER}=folder its commits would be kept, for when it is started again"
_KEPT: Final = 2


class Snapshot(NamedTuple):
    """What is committed: what every rank has alike, and what is this rank's own, by name."""

    replicated: Mapping[str, Any]
    own: Mapping[str, Any]


class Found(NamedTuple):
    """A commit that was found whole.

    names: of what all ranks had alike. replicated: the same, on rank 0 only.
    parts: what ranks of that job had for their own, each on one rank of this one. Where the number
           of ranks is the same, a rank finds its own.
    """

    number: int
    ranks: int
    names: list[str]
    replicated: Mapping[str, Any]
    parts: list[Mapping[str, Any]]


class Archive:
    """The commits in a folder; every rank calls the same methods in the same order.

    number: of the last commit that is whole; 0: none.
    """

    def __init__(self, folder: Path, kept: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.number = 0
        self._kept = kept
        self._whole: list[int] = []
        self.look()

    def look(self) -> None:
        """Learn which files every rank sees; commits from now on are told from those before.

        No number is used twice: two attempts at a commit, each with some of its files, would else
        make a whole one.
        """
        mine = [tuple(file) for file in list_files(self.folder)]
        seen: list[list[tuple[int, int, str]]] = allgather_object(mine, "elastic.files")
        self._seen = [[File(*file) for file in files] for files in seen]
        self._next = 1 + max((file.number for files in self._seen for file in files), default=0)
        self._attempt: str = broadcast_object(secrets.token_hex(8), name="elastic.attempt")

    @property
    def advice(self) -> str:
        """Return how the job can go on when it ends before its time."""
        if not self.number:
            return f"start it again; nothing is committed to {self.folder} yet"
        return (
            f"start it again with {FOLDER}={self.folder} on any number of ranks, and it goes on "
            f"from commit {self.number}"
        )

    def find(self) -> Found | None:
        """Return the newest commit that is whole; None: there is none."""
        holders: dict[File, list[int]] = {}
        for holder, files in enumerate(self._seen):
            for file in files:
                holders.setdefault(file, []).append(holder)
        for number, ranks in sorted({(f.number, f.ranks) for f in holders}, reverse=True):
            wanted = [File(number, ranks, part) for part in parts_of(ranks)]
            absent = [file.name for file in wanted if file not in holders]
            if absent:
                self._pass_over(number, f"{', '.join(absent[:3])} not there")
            elif found := self._read(number, ranks, [holders[file] for file in wanted]):
                self.number = number
                self._whole = [number]
                if rank() == 0:
                    say(
                        f"going on from commit {number} in {self.folder}, made by {ranks} "
                        f"rank{'s' * (ranks > 1)}, on {size()}"
                    )
                return found
        return None

    def _pass_over(self, number: int, why: str) -> None:
        if rank() == 0:
            say(f"commit {number} in {self.folder} is not whole: {why}; looking for an older one")

    def _read(self, number: int, ranks: int, holders: list[list[int]]) -> Found | None:
        """Read a commit, each file on one of its holders; None where one of them is damaged."""
        source, *readers = (_reader(place, at) for place, at in enumerate(holders, -1))
        files = [ALL] if source == rank() else []
        files += [part_of(place) for place, reader in enumerate(readers) if reader == rank()]
        contents: dict[str, Any] = {}
        problem = ""
        for part in files:
            file = File(number, ranks, part)
            try:
                contents[part] = read_file(self.folder, file)
            except (OSError, ObjectFormatError) as error:
                problem = problem or f"{file.name}: {error}"
        names = sorted(contents[ALL]["state"]) if ALL in contents else []
        attempts = [content["attempt"] for content in contents.values()]
        told = allgather_object((problem, attempts, names), "elastic.read")
        problems = [problem for problem, _, _ in told if problem]
        if not problems and len({a for _, attempts, _ in told for a in attempts}) > 1:
            problems = ["its files are of several attempts"]
        if problems:
            self._pass_over(number, "; ".join(problems))
            return None
        replicated = contents.pop(ALL, {"state": {}})["state"]
        if source != 0:  # each host has a folder of its own, and rank 0 sits on another than then
            replicated = broadcast_object(replicated, source, "elastic.replicated")
        parts = [content["state"] for content in contents.values()]
        return Found(number, ranks, told[source][2], replicated, parts)

    def write(self, snapshot: Snapshot) -> None:
        """Write a commit, and return when it is whole; then forget the oldest.

        Raises RuntimeError, on every rank alike, when a rank cannot write its part.
        """
        number, ranks = self._next, size()
        problem = ""
        try:
            self._write(File(number, ranks, part_of(rank())), snapshot.own)
            if rank() == 0:
                self._write(File(number, ranks, ALL), snapshot.replicated)
        except (OSError, TypeError) as error:  # no room, or an object that cannot be encoded
            problem = str(error)
        problems = allgather_object(problem, "elastic.written")
        self._next += 1
        if any(problems):
            texts = [f"rank {where}: {text}" for where, text in enumerate(problems) if text]
            last = f"commit {self.number} is whole" if self.number else "there is no other"
            raise RuntimeError(
                f"commit {number} cannot be written to {self.folder} ({FOLDER}): "
                f"{'; '.join(texts)}; {last}"
            )
        self.number = number
        self._whole = [*self._whole, number][-self._kept :]
        remove_files(self.folder, self._is_unwanted)

    def _write(self, file: File, state: Mapping[str, Any]) -> None:
        write_file(self.folder, file, encode({"attempt": self._attempt, "state": dict(state)}))

    def _is_unwanted(self, file: File) -> bool:
        """Tell whether a file is older than the commits kept, and this rank's to remove."""
        place = 0 if file.part == ALL else int(file.part.removeprefix("rank-"))
        mine = place % size() == rank()
        return mine and file.number < self._next and file.number not in self._whole


def _reader(place: int, holders: list[int]) -> int:
    """Return who reads a file: the rank whose part it is, or as near to it as can be."""
    wanted = max(place, 0) % size()
    return wanted if wanted in holders else holders[0]


# In use by a state of this rank.
_open: weakref.WeakKeyDictionary[world.World, weakref.ref[Archive]] = weakref.WeakKeyDictionary()


def open_archive() -> Archive | None:
    """Return the archive that the environment asks for; None: commits stay in memory.

    Raises ValueError, on every rank alike, when the ranks are asked for different things.
    """
    folder, kept = os.environ.get(FOLDER, ""), os.environ.get(KEEP, str(_KEPT))
    asked = allgather_object((bool(folder), kept), "elastic.asked")
    if len(set(asked)) > 1:
        raise ValueError(
            f"{FOLDER} must be set on every rank or on none, and {KEEP} alike, got "
            f"{asked} by rank; mpirun hands variables to other hosts with -x"
        )
    if not folder:
        return None
    if not kept.isdecimal() or int(kept) < 1:
        raise ValueError(f"{KEEP} must be a number of commits of at least 1, got {kept!r}")
    here = world.current()
    archive = _open[here]() if here in _open else None
    if archive is not None and archive.folder == Path(folder):
        raise ValueError(
            f"{FOLDER}={folder} keeps one state, and this is the second on rank {rank()}; put what "
            "both hold into one TorchState, models and optimizers by keywords of your choice"
        )
    archive = Archive(Path(folder), int(kept))
    _open[here] = weakref.ref(archive)
    return archive

"""RankFile: what a rank wrote, read as far as it came, and on from there once it wrote more."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from .lines import FORMAT, Line, rank_of, shown, sound

_BLOCK_BYTES: Final = 1 << 20
_BEGIN: Final = b'{"what": "begin"'
_STEP: Final = b'{"what": "step"'
_SKIPPED: Final = b'"skipped": true'


class RankFile:
    """A rank's file, which may hold several runs, one after the other.

    attempts: the lines from each "begin" on: of the last run, and of what it went on from.
    earlier_runs: how many the file holds before them.
    unsound: how many lines were passed over, as gtopk has not written them.
    recent_steps: None: all of them; else of an attempt's steps so many, the last, and those that
                  were skipped, and of what else was noted the last of its kind, with all values.
    """

    def __init__(self, path: Path, recent_steps: int | None = None) -> None:
        self.attempts: list[list[Line]] = []
        self.earlier_runs = self.unsound = 0
        self._before: list[list[Line]] = []  # until its first step the last one may be of their run
        self._path, self._recent_steps = path, recent_steps
        self._rank = rank_of(path)
        self._inode = self._read_bytes = 0

    def read_on(self) -> list[list[Line]]:
        """Return the attempts, with what was written since; raise ValueError for another version.

        A line that is not whole, as a killed rank leaves one, is passed over.
        """
        with self._path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._read_bytes:
                self.attempts, self._before, self.earlier_runs, self.unsound = [], [], 0, 0
                self._inode, self._read_bytes = status.st_ino, 0
            file.seek(self._read_bytes)
            while texts := file.readlines(_BLOCK_BYTES):
                is_cut = not texts[-1].endswith(b"\n") and _parsed(texts[-1]) is None
                if is_cut:
                    texts.pop()  # its rest may come
                self._read_bytes += sum(map(len, texts))
                self._take(texts)
                if is_cut:
                    break
        return self.attempts

    def _take(self, texts: Sequence[bytes]) -> None:
        if self._recent_steps is not None:
            texts = _without_old_steps(texts, self._recent_steps)
        for text in texts:
            line = _parsed(text)
            if line is None:
                continue
            if line["what"] == "begin":
                _require_format(line)
            line = sound(line, self._rank)
            if line is None:
                self.unsound += 1
                continue
            if line["what"] == "begin":
                self._begin(line)
            elif self.attempts:
                self._decide(line["what"])
                self.attempts[-1].append(line)
        if self._recent_steps is not None:
            self.attempts = [
                [begin, *_latest(lines, self._recent_steps)] for begin, *lines in self.attempts
            ]

    def _begin(self, line: Line) -> None:
        # In earlier versions a "begin" that is not of step 0 went on in any case.
        if not line.get("again", line["step"] > 0):
            self._before, self.attempts = self._before + self.attempts, []
        self.attempts.append([line])

    def _decide(self, what: str) -> None:
        """Tell from a line whether the last attempt goes on from those before it."""
        if what == "resumed":
            self.attempts = self._before + self.attempts
        if what in ("resumed", "step"):
            self.earlier_runs += what == "step" and bool(self._before)
            self._before = []


def _require_format(line: Line) -> None:
    if line.get("format") != FORMAT:
        raise ValueError(
            f"the record is of format {shown(str(line.get('format')))}, written by gtopk "
            f"{shown(str(line.get('gtopk')))}; this version reads format {FORMAT}"
        )


def has_ended(path: Path) -> bool:
    """Tell whether the last of the runs in a rank's file, if there is one, says how it left."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _BLOCK_BYTES))
            texts = file.read().splitlines()
    except OSError:
        return False
    line = _parsed(texts[-1]) if texts else None
    return line is not None and line["what"] == "end"


def _parsed(text: bytes) -> Line | None:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):  # a killed rank's half a line; nonsense
        return None
    return line if isinstance(line, dict) and "what" in line else None


def _without_old_steps(texts: Sequence[bytes], count: int) -> list[bytes]:
    """Leave out steps before the last of each attempt, unread: most of a file, slow to parse."""
    kept = []
    left = count
    for text in reversed(texts):
        is_step = text.startswith(_STEP) and _SKIPPED not in text
        left = count if text.startswith(_BEGIN) else left - is_step
        if not is_step or left >= 0:
            kept.append(text)
    return kept[::-1]


def _latest(lines: Sequence[Line], count: int) -> list[Line]:
    """Return lines without what later ones have made old; values are put together in the last."""
    kept: list[Line] = []
    last: dict[str, Line] = {}
    for line in reversed(lines):
        what = line["what"]
        if what == "step":
            if count > 0 or line["skipped"]:
                kept.append(line)
            count -= 1
        elif what not in last:
            last[what] = line
            kept.append(line)
        elif what == "values":
            last[what]["values"] = line["values"] | last[what]["values"]
    return kept[::-1]

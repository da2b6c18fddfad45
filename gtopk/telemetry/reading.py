"""Reads a run's record, even while ranks still write it.

RankFile reads a rank's file to its end, and continues from there once the rank has written more.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from ..units import listed
from .lines import FORMAT, Line, left_in_order, rank_of, report_of, shown, validated
from .step_report import StepReport

_BLOCK_BYTES: Final = 1 << 20
_BEGIN: Final = b'{"what": "begin"'
_STEP: Final = b'{"what": "step"'
_SKIPPED: Final = b'"skipped": true'


class RankFile:
    """A rank's file, which may hold several runs, one after the other.

    attempts: for each "begin" its lines, of the last run and the runs that it resumed.
    earlier_runs: the number of runs in the file before those.
    unsound: the number of invalid lines that were ignored.
    recent_steps: None keeps all lines. A number keeps that many last steps of an attempt, all
                  skipped ones, and the last line of each other kind, with all logged names.
    """

    def __init__(self, path: Path, recent_steps: int | None = None) -> None:
        self.attempts: list[list[Line]] = []
        self.earlier_runs = self.unsound = 0
        self._before: list[list[Line]] = []  # earlier attempts, which the last one may resume
        self._path, self._recent_steps = path, recent_steps
        self._rank = rank_of(path)
        self._inode = self._read_bytes = 0

    def read_new_lines(self) -> list[list[Line]]:
        """Read new lines, and return the attempts; raise ValueError for another version's file.

        An incomplete line, as a killed rank leaves, is ignored.
        """
        with self._path.open("rb") as file:
            status = os.fstat(file.fileno())
            # The file was replaced or truncated: discard the lines read so far.
            if status.st_ino != self._inode or status.st_size < self._read_bytes:
                self.attempts, self._before, self.earlier_runs, self.unsound = [], [], 0, 0
                self._inode, self._read_bytes = status.st_ino, 0
            file.seek(self._read_bytes)
            while texts := file.readlines(_BLOCK_BYTES):
                # The rest of the line may follow: read it again from its beginning next time.
                is_cut = not texts[-1].endswith(b"\n") and _parsed(texts[-1]) is None
                if is_cut:
                    texts.pop()
                self._read_bytes += sum(map(len, texts))
                self._parse_lines(texts)
                if is_cut:
                    break
        return self.attempts

    def _parse_lines(self, texts: Sequence[bytes]) -> None:
        if self._recent_steps is not None:
            texts = _drop_old_steps(texts, self._recent_steps)
        for text in texts:
            line = _parsed(text)
            if line is None:
                continue
            if line["what"] == "begin" and line.get("format") != FORMAT:
                raise ValueError(
                    f"the record is of format {shown(str(line.get('format')))}, written by gtopk "
                    f"{shown(str(line.get('gtopk')))}; this version reads format {FORMAT}"
                )
            line = validated(line, self._rank)
            if line is None:
                self.unsound += 1
                continue
            if line["what"] == "begin":
                self._begin(line)
            elif self.attempts:
                self._note_resume(line["what"])
                self.attempts[-1].append(line)
        if self._recent_steps is not None:
            self.attempts = [
                [begin, *_latest(lines, self._recent_steps)] for begin, *lines in self.attempts
            ]

    def _begin(self, line: Line) -> None:
        # In earlier versions a "begin" at any step but 0 resumed a run.
        if not line.get("again", line["step"] > 0):
            self._before, self.attempts = self._before + self.attempts, []
        self.attempts.append([line])

    def _note_resume(self, what: str) -> None:
        """Decide from a line whether the last attempt resumes those before it."""
        if what == "resumed":
            self.attempts = self._before + self.attempts
        # A first step without "resumed" before it shows that the run is new.
        if what in ("resumed", "step"):
            self.earlier_runs += what == "step" and bool(self._before)
            self._before = []


def has_ended(path: Path) -> bool:
    """Tell whether the last run in a rank's file has an "end"; False without a run."""
    try:
        with path.open("rb") as file:
            # Read only the end: the file may have hundreds of megabytes, and a job waits here.
            file.seek(max(0, path.stat().st_size - _BLOCK_BYTES))
            texts = file.read().splitlines()
    except OSError:
        return False
    line = _parsed(texts[-1]) if texts else None
    return line is not None and line["what"] == "end"


def _parsed(text: bytes) -> Line | None:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        # Part of a line from a killed rank, or garbage.
        return None
    return line if isinstance(line, dict) and "what" in line else None


def _drop_old_steps(texts: Sequence[bytes], count: int) -> list[bytes]:
    """Drop all but the last steps of each attempt unparsed: they are most of a file."""
    kept = []
    left = count
    for text in reversed(texts):
        # Compare the bytes that `as_text` writes; a line in any other form is kept and parsed.
        is_step = text.startswith(_STEP) and _SKIPPED not in text
        left = count if text.startswith(_BEGIN) else left - is_step
        if not is_step or left >= 0:
            kept.append(text)
    return kept[::-1]


def _latest(lines: Sequence[Line], count: int) -> list[Line]:
    """Return lines without those that later ones replace; merge logged values into the last."""
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


_PATTERN: Final = "rank-*.jsonl"

# A rank's attempts, in order, by the start time that all ranks agreed on.
Attempts: TypeAlias = dict[float, list[Line]]


class Step(NamedTuple):
    """A step of a rank.

    seconds: since the run began, on rank 0's clock.
    bytes_so_far, samples_so_far: bytes sent and samples used by the rank since then, including lost
                                  and repeated steps.
    """

    seconds: float
    bytes_so_far: int
    samples_so_far: int
    report: StepReport


class Note(NamedTuple):
    """A line of a rank that is not a step."""

    seconds: float
    step: int
    content: dict[str, Any]


@dataclass
class RankRecord:
    """One rank's record.

    begin:   the fields of its last "begin".
    steps:   each step once. If the run went back to a checkpoint, the first attempts of repeated
             steps, and the notes in them, are left out.
    begins:  indices in `steps` at which the rank began or resumed from a checkpoint.
    earlier: the number of steps before the last of these.
    from_step: the step at which the record begins.
    began_seconds: seconds from the run's begin to this rank's.
    end:     how it left; None if it still runs, or was killed.
    in_order: whether it left in order.
    """

    begin: Line
    steps: list[Step] = field(default_factory=list)
    residuals: list[Note] = field(default_factory=list)
    scores: list[Note] = field(default_factory=list)
    values: list[Note] = field(default_factory=list)
    messages: list[Note] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    earlier: int = 0
    from_step: int = 0
    began_seconds: float = 0.0
    end: str | None = None
    in_order: bool = True
    last_seconds: float = 0.0

    @property
    def rank(self) -> int:
        return int(self.begin["rank"])

    @property
    def step_count(self) -> int:
        """Return the number of its steps, including those without a line."""
        return self.steps[-1].report.step + 1 - self.from_step if self.steps else 0

    def discard_from(self, step: int) -> None:
        """Remove the steps and notes from this step on, which will be repeated."""
        self.steps = [each for each in self.steps if each.report.step < step]
        self.earlier = len(self.steps)
        self.begins = [place for place in self.begins if place < self.earlier] + [self.earlier]
        if not self.steps:
            self.from_step = step
        # Keep messages: a warning from a repeated step was still given.
        for notes in (self.residuals, self.scores, self.values):
            # A note precedes the step that it belongs to.
            notes[:] = [note for note in notes if note.step <= step]


@dataclass
class Run:
    """A run, as read from its record.

    ranks: the ranks with a record, in order.
    began_unix_seconds: when the run began.
    earlier_runs: the number of other runs in the folder.
    unsound: the number of invalid lines that were ignored.
    """

    ranks: list[RankRecord]
    began_unix_seconds: float
    earlier_runs: int = 0
    unsound: int = 0

    @property
    def first(self) -> RankRecord:
        """Return the record of rank 0, or of the lowest rank with one."""
        return self.ranks[0]

    @property
    def seconds(self) -> float:
        """Return the seconds from the run's begin to its last line."""
        return max(each.last_seconds for each in self.ranks)

    @property
    def missing(self) -> list[int]:
        """Return the run's ranks without a record."""
        read = {each.rank for each in self.ranks}
        return [rank for rank in range(int(self.first.begin["ranks"])) if rank not in read]

    def missing_text(self) -> tuple[str, str] | None:
        """Return which ranks have no record, and a text about it; None if all have one."""
        missing = self.missing
        if not missing:
            return None
        who = f"rank{'s' * (len(missing) > 1)} {listed([*map(str, missing)])}"
        return who, "no record found: the file is missing, or without a whole first line"

    def skipped_text(self) -> tuple[str, str] | None:
        """Return a subject and a text about ignored lines; None if there are none."""
        if not self.unsound:
            return None
        lines = "a line" if self.unsound == 1 else f"{self.unsound} lines"
        return "the record", f"skipped {lines} of an unknown format"


class NoRunError(ValueError):
    """Raised if a folder holds no record of a run, or none yet."""


class Reader:
    """Reads a run's record; each further `read` reads only new lines.

    recent_steps: the steps of each rank to keep, see RankFile; None keeps all lines.
    """

    def __init__(self, folder: Path, recent_steps: int | None = None) -> None:
        self._folder, self._recent_steps = folder, recent_steps
        self._files: dict[Path, RankFile] = {}

    def read(self) -> Run:
        """Return the run; raise NoRunError if there is none, ValueError for another version's.

        If the folder holds several runs, return the last one, with those that it resumed.
        """
        # Known files resume where reading stopped; removed files are dropped.
        self._files = {
            path: self._files.get(path) or RankFile(path, self._recent_steps)
            for path in sorted(self._folder.glob(_PATTERN))
        }
        found = [attempts for file in self._files.values() if (attempts := file.read_new_lines())]
        if not self._files:
            raise NoRunError(
                f"'{self._folder}' must hold a run's record, files named {_PATTERN}, and has none: "
                "record a run with `gtopk run --record FOLDER`, or with GTOPK_RUN=FOLDER in its "
                "environment"
            )
        if not found:
            raise NoRunError(
                f"'{self._folder}' must hold a run's record, and has only files without a whole "
                f"first line, empty or damaged: {listed([path.name for path in self._files])}"
            )
        run = _assemble(found)
        run.earlier_runs = max(file.earlier_runs for file in self._files.values())
        run.unsound = sum(file.unsound for file in self._files.values())
        return run


def read_run(folder: Path) -> Run:
    """Return a run's whole record; raise the errors of `Reader.read`."""
    return Reader(folder).read()


def accuracy_and_loss_first(names: Iterable[str]) -> list[str]:
    """Sort the names of logged values: accuracy and loss first, then the others, each in order."""
    return sorted(
        names, key=lambda name: ("accuracy" not in name.lower(), "loss" not in name.lower(), name)
    )


def _assemble(found: Iterable[Sequence[list[Line]]]) -> Run:
    """Return the last run, assembled from all ranks' attempts."""
    files = {attempts[-1][0]["rank"]: _attempts_by_start(attempts) for attempts in found}
    newest = max(files.values(), key=lambda each: _start_seconds(_last(each)))
    # Use the newest "begin" of all files: some may be of ranks that only earlier runs had.
    ranks, start = _last(newest)["ranks"], [*newest][-1]
    # A world's ranks count from 0, so the lowest rank took part in the whole run. Attempts without
    # it, and those of ranks beyond this world's, belong to other runs.
    reference = files[min(rank for rank, attempts in files.items() if start in attempts)]
    began = next(iter(reference.values()))[0]["unix_seconds"]
    current = [
        {start: lines for start, lines in attempts.items() if start in reference}
        for rank, attempts in sorted(files.items())
        if rank < ranks
    ]
    return Run([_record(attempts, reference, began) for attempts in current if attempts], began)


def _attempts_by_start(attempts: Sequence[list[Line]]) -> Attempts:
    """Return attempts by the time their ranks met, or by index from the end in older records."""
    places = range(-len(attempts), 0)
    return {
        lines[0].get("began_unix_seconds", place): lines
        for place, lines in zip(places, attempts, strict=True)
    }


def _last(attempts: Attempts) -> Line:
    return next(reversed(attempts.values()))[0]


def _start_seconds(begin: Line) -> float:
    """Return the time when the ranks met; in older records, on this rank's own clock."""
    return float(begin.get("began_unix_seconds") or begin["unix_seconds"])


def _record(attempts: Attempts, reference_attempts: Attempts, began: float) -> RankRecord:
    record = RankRecord(_last(attempts))
    bytes_before = samples_before = 0
    for met_seconds, (begin, *lines) in attempts.items():
        reference = reference_attempts[met_seconds][0]
        # Convert to rank 0's clock, then to its calendar time, the only clock that attempts share.
        start = reference["unix_seconds"] + begin["seconds"] - reference["seconds"] - began
        # A rank may have joined the run late, on a new host of an elastic job.
        if met_seconds == next(iter(attempts)):
            record.began_seconds = start
        # The previous attempt's end says why this one was needed.
        if record.end is not None and not record.in_order:
            step = record.steps[-1].report.step if record.steps else 0
            record.messages.append(Note(record.last_seconds, step, {"text": record.end}))
        record.end, record.earlier = None, len(record.steps)
        resume_step: int | None = begin["step"]
        for line in lines:
            if line["what"] == "resumed":
                resume_step = line["step"]
            elif line["what"] == "step" and resume_step is not None:
                record.discard_from(resume_step)
                resume_step = None
            _add(record, line, start + line["seconds"], bytes_before, samples_before)
        if record.steps:
            _, bytes_before, samples_before, _ = record.steps[-1]
    return record


# The fields of a RankRecord, by kind of line.
_NOTES: Final = {
    "withheld": "residuals",
    "score": "scores",
    "values": "values",
    "message": "messages",
}


def _add(
    record: RankRecord, line: Line, seconds: float, bytes_before: int, samples_before: int
) -> None:
    record.last_seconds = max(record.last_seconds, seconds)
    what = line["what"]
    if what == "step":
        sent, report = bytes_before + line["bytes_so_far"], report_of(line)
        if "samples_so_far" in line:
            used = samples_before + line["samples_so_far"]
        else:  # an earlier version's record: count the samples of the written steps
            used = (record.steps[-1].samples_so_far if record.steps else 0) + (report.samples or 0)
        record.steps.append(Step(seconds, sent, used, report))
        record.end = None
    elif what == "end":
        record.end, record.in_order = line["how"], left_in_order(line)
    elif what in _NOTES:
        content = line["values"] if what == "values" else line
        getattr(record, _NOTES[what]).append(Note(seconds, line["step"], content))

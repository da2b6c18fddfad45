"""Reading a run's record: what each rank wrote, as far as it came."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from .lines import Line, left_in_order, report_of
from .rank_file import RankFile
from .step_report import StepReport

_PATTERN: Final = "rank-*.jsonl"
_FEW: Final = 12  # ranks or files that are named

# A rank's attempts, in order, each by when all its ranks began: they have agreed on that.
Attempts: TypeAlias = dict[float, list[Line]]


class Step(NamedTuple):
    """A step of a rank.

    seconds: since the run began, on rank 0's clock.
    bytes_so_far, samples_so_far: that the rank has sent, and taken in, since then; for what was
                                  lost, and done again, too.
    """

    seconds: float
    bytes_so_far: int
    samples_so_far: int
    report: StepReport


class Note(NamedTuple):
    """Something else that a rank wrote."""

    seconds: float
    step: int
    content: dict[str, Any]


@dataclass
class RankRecord:
    """One rank's record.

    begin:   who it is; of the last time that ranks met.
    steps:   each once: where the run went back to a checkpoint, those that it was to do again, and
             what was noted in them, are left out.
    begins:  places in steps at which it began, or went on from a checkpoint.
    earlier: how many of them it did before it last did so.
    from_step: the step that the first of them was to be: those before it are not in the record.
    began_seconds: when it first began, since the run did.
    end:     how it left; None: it goes on, or was killed. in_order: whether that is as it should.
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
        """Return which rank it is."""
        return int(self.begin["rank"])

    @property
    def taken(self) -> int:
        """Return how many steps it took, those without a line included."""
        return self.steps[-1].report.step + 1 - self.from_step if self.steps else 0

    def go_on_from(self, step: int) -> None:
        """Leave out what was done from this step on: it is done again."""
        self.steps = [each for each in self.steps if each.report.step < step]
        self.earlier = len(self.steps)
        self.begins = [place for place in self.begins if place < self.earlier] + [self.earlier]
        if not self.steps:
            self.from_step = step
        for notes in (self.residuals, self.scores, self.values):
            notes[:] = [note for note in notes if note.step <= step]  # before it, and right there


@dataclass
class Run:
    """A run, as its record has it.

    ranks: those that wrote something, in order.
    began_unix_seconds: when it did.
    earlier_runs: how many the folder holds besides, which are none of it.
    unsound: how many lines were passed over, as gtopk has not written them.
    """

    ranks: list[RankRecord]
    began_unix_seconds: float
    earlier_runs: int = 0
    unsound: int = 0

    @property
    def first(self) -> RankRecord:
        """Return rank 0's record, or that of the lowest rank there is."""
        return self.ranks[0]

    @property
    def seconds(self) -> float:
        """Return how long it has gone on."""
        return max(each.last_seconds for each in self.ranks)

    @property
    def missing(self) -> list[int]:
        """Return the ranks that it had, and that there is no record of."""
        read = {each.rank for each in self.ranks}
        return [rank for rank in range(int(self.first.begin["ranks"])) if rank not in read]

    def lacks(self) -> tuple[str, str] | None:
        """Return which ranks there is no record of, and what that means; None where it has all."""
        missing = self.missing
        if not missing:
            return None
        who = f"rank{'s' * (len(missing) > 1)} {_listed(map(str, missing))}"
        return who, "no record is here: the file is missing, or without a whole first line"

    def unread(self) -> tuple[str, str] | None:
        """Return where lines were passed over, and how many; None where there were none."""
        if not self.unsound:
            return None
        lines = "a line" if self.unsound == 1 else f"{self.unsound} lines"
        return "the record", f"{lines} that gtopk has not written so: passed over"


class NoRunError(ValueError):
    """A folder holds no run's record, or none yet."""


class Reader:
    """Reads a run's record, and read again, only what was written since.

    recent_steps: what is kept of each rank's lines, see RankFile; None: all of them.
    """

    def __init__(self, folder: Path, recent_steps: int | None = None) -> None:
        self._folder, self._recent_steps = folder, recent_steps
        self._files: dict[Path, RankFile] = {}

    def read(self) -> Run:
        """Return the run; raise NoRunError where there is none, ValueError for another version's.

        A folder may hold several runs, one after the other: it is the last one, with what it went
        on from.
        """
        self._files = {
            path: self._files.get(path) or RankFile(path, self._recent_steps)
            for path in sorted(self._folder.glob(_PATTERN))
        }
        found = [attempts for file in self._files.values() if (attempts := file.read_on())]
        if not self._files:
            raise NoRunError(
                f"'{self._folder}' must hold a run's record, files named {_PATTERN}, and has none: "
                "record a run with `gtopk run --record FOLDER`, or with GTOPK_RUN=FOLDER in its "
                "environment"
            )
        if not found:
            raise NoRunError(
                f"'{self._folder}' must hold a run's record, and has only files without a whole "
                f"first line, empty or damaged: {_listed(path.name for path in self._files)}"
            )
        run = _put_together(found)
        run.earlier_runs = max(file.earlier_runs for file in self._files.values())
        run.unsound = sum(file.unsound for file in self._files.values())
        return run


def read_run(folder: Path) -> Run:
    """Return a run's record, all of it; raise ValueError as Reader does."""
    return Reader(folder).read()


def by_interest(names: Iterable[str]) -> list[str]:
    """Return names of logged values: accuracy and loss first, then the others, each in order."""
    return sorted(
        names, key=lambda name: ("accuracy" not in name.lower(), "loss" not in name.lower(), name)
    )


def _listed(names: Iterable[str]) -> str:
    """Return the first of them, and how many there are besides."""
    every = list(names)
    more = f" and {len(every) - _FEW} more" if len(every) > _FEW else ""
    return ", ".join(every[:_FEW]) + more


def _put_together(found: Iterable[Sequence[list[Line]]]) -> Run:
    """Return the last run, of what ranks wrote."""
    files = {attempts[-1][0]["rank"]: _by_meeting(attempts) for attempts in found}
    newest = max(files.values(), key=lambda each: _when(_last(each)))
    ranks, met = _last(newest)["ranks"], [*newest][-1]
    # A world is of the ranks from 0 on: the lowest one was in all of the run, and what others did
    # without it was another; as was what ranks beyond this world's did.
    lead = files[min(rank for rank, attempts in files.items() if met in attempts)]
    began = next(iter(lead.values()))[0]["unix_seconds"]
    current = [
        {met: lines for met, lines in attempts.items() if met in lead}
        for rank, attempts in sorted(files.items())
        if rank < ranks
    ]
    return Run([_record(attempts, lead, began) for attempts in current if attempts], began)


def _by_meeting(attempts: Sequence[list[Line]]) -> Attempts:
    """Return attempts by when their ranks met; in earlier versions, by their place from the end."""
    places = range(-len(attempts), 0)
    return {
        lines[0].get("began_unix_seconds", place): lines
        for place, lines in zip(places, attempts, strict=True)
    }


def _last(attempts: Attempts) -> Line:
    """Return the last begin."""
    return next(reversed(attempts.values()))[0]


def _when(begin: Line) -> float:
    """Return when the ranks met; of an earlier version, by this rank's own calendar."""
    return float(begin.get("began_unix_seconds") or begin["unix_seconds"])


def _record(attempts: Attempts, lead: Attempts, began: float) -> RankRecord:
    record = RankRecord(_last(attempts))
    bytes_before = samples_before = 0
    for met, (begin, *lines) in attempts.items():
        reference = lead[met][0]
        # On rank 0's clock, and from there by its calendar: attempts share no other clock.
        start = reference["unix_seconds"] + begin["seconds"] - reference["seconds"] - began
        if met == next(iter(attempts)):
            record.began_seconds = start
        record.end, record.earlier = None, len(record.steps)
        goes_on_from: int | None = begin["step"]
        for line in lines:
            if line["what"] == "resumed":
                goes_on_from = line["step"]
            elif line["what"] == "step" and goes_on_from is not None:
                record.go_on_from(goes_on_from)
                goes_on_from = None
            _add(record, line, start + line["seconds"], bytes_before, samples_before)
        if record.steps:
            _, bytes_before, samples_before, _ = record.steps[-1]
    return record


def _add(
    record: RankRecord, line: Line, seconds: float, bytes_before: int, samples_before: int
) -> None:
    record.last_seconds = max(record.last_seconds, seconds)
    what = line["what"]
    if what == "step":
        sent, report = bytes_before + line["bytes_so_far"], report_of(line)
        if "samples_so_far" in line:
            taken = samples_before + line["samples_so_far"]
        else:  # of an earlier version: those of the steps that were written
            taken = (record.steps[-1].samples_so_far if record.steps else 0) + (report.samples or 0)
        record.steps.append(Step(seconds, sent, taken, report))
        record.end = None
    elif what == "withheld":
        record.residuals.append(Note(seconds, line["step"], line))
    elif what == "score":
        record.scores.append(Note(seconds, line["step"], line))
    elif what == "values":
        record.values.append(Note(seconds, line["step"], line["values"]))
    elif what == "message":
        record.messages.append(Note(seconds, line["step"], line))
    elif what == "end":
        record.end, record.in_order = line["how"], left_in_order(line)

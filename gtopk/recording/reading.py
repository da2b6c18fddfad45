"""Reading a run's record: what each rank wrote, as far as it came."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..telemetry import StepReport
from .lines import Line, report_of
from .rank_file import RankFile

_PATTERN: Final = "rank-*.jsonl"
_FEW: Final = 12  # ranks or files that are named


class Step(NamedTuple):
    """A step of a rank.

    seconds: since the run began, on rank 0's clock.
    bytes_so_far, samples_so_far: that the rank has sent, and taken in, since then.
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
    """What one rank wrote.

    begin: who it is; of the last time that ranks met.
    end:   how it left; None: it goes on, or was killed.
    """

    begin: Line
    steps: list[Step] = field(default_factory=list)
    withheld: list[Note] = field(default_factory=list)
    scores: list[Note] = field(default_factory=list)
    values: list[Note] = field(default_factory=list)
    messages: list[Note] = field(default_factory=list)
    end: str | None = None
    last_seconds: float = 0.0

    @property
    def rank(self) -> int:
        """Return which rank it is."""
        return int(self.begin["rank"])


@dataclass
class Run:
    """A run, as its record has it.

    ranks: those that wrote something, in order.
    began_unix_seconds: when it did.
    """

    ranks: list[RankRecord]
    began_unix_seconds: float

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


class Reader:
    """Reads a run's record, and read again, only what was written since.

    recent_steps: what is kept of each rank's lines, see RankFile; None: all of them.
    """

    def __init__(self, folder: Path, recent_steps: int | None = None) -> None:
        self._folder, self._recent_steps = folder, recent_steps
        self._files: dict[Path, RankFile] = {}

    def read(self) -> Run:
        """Return the run; raise ValueError where there is none, or one of another version.

        A folder may hold several runs, one after the other: it is the last one, with what it went
        on from.
        """
        self._files = {
            path: self._files.get(path) or RankFile(path, self._recent_steps)
            for path in sorted(self._folder.glob(_PATTERN))
        }
        found = [attempts for file in self._files.values() if (attempts := file.read_on())]
        if not self._files:
            raise ValueError(
                f"'{self._folder}' must hold a run's record, files named {_PATTERN}, and has none: "
                "record a run with GTOPK_RUN=FOLDER in its environment"
            )
        if not found:
            raise ValueError(
                f"'{self._folder}' must hold a run's record, and has only files without a whole "
                f"first line, empty or damaged: {_listed(path.name for path in self._files)}"
            )
        most = max(attempts[-1][0]["unix_seconds"] for attempts in found)
        current = [each for each in found if _is_of(each[-1][0], most, found)]
        began = min(attempts[0][0]["unix_seconds"] for attempts in current)
        lead = min(current, key=lambda attempts: attempts[-1][0]["rank"])
        ranks = [_record(attempts, lead, began) for attempts in current]
        return Run(sorted(ranks, key=lambda each: each.rank), began)


def read_run(folder: Path) -> Run:
    """Return a run's record, all of it; raise ValueError as Reader does."""
    return Reader(folder).read()


def _listed(names: Iterable[str]) -> str:
    """Return the first of them, and how many there are besides."""
    every = list(names)
    more = f" and {len(every) - _FEW} more" if len(every) > _FEW else ""
    return ", ".join(every[:_FEW]) + more


def _is_of(begin: Line, most: float, found: Sequence[Sequence[Sequence[Line]]]) -> bool:
    """Tell whether a rank is of the last run: of more ranks, those beyond are of an earlier one."""
    last = next(a[-1][0] for a in found if a[-1][0]["unix_seconds"] == most)
    return int(begin["rank"]) < int(last["ranks"])


def _record(attempts: list[list[Line]], lead: list[list[Line]], began: float) -> RankRecord:
    record = RankRecord(attempts[-1][0])
    bytes_before = samples_before = 0
    for place in range(-len(attempts), 0):
        begin, *lines = attempts[place]
        reference = lead[place][0] if -place <= len(lead) else begin
        # On rank 0's clock, and from there by its calendar: attempts share no other clock.
        start = reference["unix_seconds"] + begin["seconds"] - reference["seconds"] - began
        for line in lines:
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
        record.withheld.append(Note(seconds, line["step"], line))
    elif what == "score":
        record.scores.append(Note(seconds, line["step"], line))
    elif what == "values":
        record.values.append(Note(seconds, line["step"], line["values"]))
    elif what == "message":
        record.messages.append(Note(seconds, line["step"], line))
    elif what == "end":
        record.end = line["how"]

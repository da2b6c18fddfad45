"""Recorder: notes a rank's steps and events, which a thread of its own writes to sinks.

Residual sampling: at some steps the norm of the residual is noted; that reads all of it.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, Protocol

from ..exchange.sparse_gradients import AnyBucketExchange
from .lines import Line, step_line
from .step_report import StepReport

_log = logging.getLogger("gtopk")

Noted = tuple[StepReport, float, int, int]  # what step_line makes a line of
# Between two writes; a killed rank may lose as much.
_PAUSE_SECONDS: Final = 0.2


class Sink(Protocol):
    """A destination of lines: a file, a tracker, or a script's own, for `gtopk.record(sinks=)`.

    name: its name in messages.
    Lines are dicts of plain values, as `gtopk.telemetry.lines` describes; `scalars_of` yields names
    and numbers of one. The recorder's thread calls `take` five times a second. A sink that raises
    is dropped with a warning; training goes on.
    """

    name: str

    def take(self, lines: Sequence[Line]) -> None:
        """Take lines, in chronological order."""

    def close(self) -> None:
        """Finish: no more lines come."""


class Recorder:
    """Notes events from any thread of the program; its own thread writes them to the sinks.

    began: by time.perf_counter; notes have seconds since then.
    every: write one of this many steps.
    step:  returns how many steps this rank has finished.
    """

    def __init__(
        self, sinks: Sequence[Sink], begin: Line, began: float, every: int, step: Callable[[], int]
    ) -> None:
        self._sinks = list(sinks)
        self._began, self._every, self._step = began, every, step
        # Appending to a deque, and taking from it, is atomic: a note takes no lock from training.
        self._noted: deque[Line | Noted] = deque([begin])
        self._bytes = self._samples = self._steps = 0
        self._samples_said: int | None = None  # by the script, for the current step
        self._left_out: Noted | None = None  # the last step, if `every` leaves it out
        # Reentrant: a handler of SIGTERM may end the record, and run within another write of its
        # thread.
        self._writing = threading.RLock()
        self._closing = threading.Event()
        self._ended = False
        self._handler = _MessageHandler(self)
        _log.addHandler(self._handler)
        self._thread = threading.Thread(target=self._run, name="gtopk-recorder", daemon=True)
        self._thread.start()

    def note_step(self, report: StepReport) -> None:
        """Note a step, with the script's number of samples where the report has none."""
        if report.samples is None:
            report = replace(report, samples=self._samples_said)
        self._samples_said = None
        self._bytes += report.sent_bytes
        self._samples += report.samples or 0
        self._steps += 1
        noted = (report, self._now(), self._bytes, self._samples)
        # Skipped steps are rare and wanted; the first one shows that the record works.
        if self._steps % self._every == 0 or report.skipped or self._steps == 1:
            self._left_out = None
            self._noted.append(noted)
        else:
            self._left_out = noted

    def note_samples(self, count: int) -> None:
        """Add samples to those of the current step."""
        self._samples_said = (self._samples_said or 0) + count

    def note(self, what: str, **content: Any) -> None:
        """Note a line of this kind; `lines` describes them, and what each holds."""
        line = {"what": what, "seconds": self._now(), "step": self._step(), **content}
        self._noted.append(line)

    def end(self, how: str, in_order: bool = True) -> None:
        """Write the last step, all notes and how this rank leaves, now.

        Only the first call's reason counts.
        """
        if not self._ended:
            self._ended = True
            self._note_left_out()
            self.note("end", how=how, in_order=in_order)
        self.flush()

    def flush(self) -> None:
        """Write all notes now."""
        with self._writing:
            lines: list[Line] = []
            while self._noted:
                note = self._noted.popleft()
                lines.append(note if isinstance(note, dict) else step_line(*note))
            if lines:
                for sink in list(self._sinks):
                    with self._drop_on_error(sink):
                        sink.take(lines)

    def close(self) -> list[Sink]:
        """Write the last step and all notes, and stop.

        Returns the sinks left open for a run that goes on in another world (`goes_on`).
        """
        if self._closing.is_set():
            return []
        if not self._ended:
            self._note_left_out()
        # Before the thread is waited for, and then the last flush: nothing may be noted in between.
        self._closing.set()
        _log.removeHandler(self._handler)
        self._thread.join()
        self.flush()
        with self._writing:
            # Only without an end: after one, the run of such a sink is over, too.
            open_still = [
                s for s in self._sinks if not self._ended and getattr(s, "goes_on", False)
            ]
            for sink in [s for s in self._sinks if s not in open_still]:
                with self._drop_on_error(sink):
                    sink.close()
            self._sinks.clear()
        return open_still

    def _now(self) -> float:
        return time.perf_counter() - self._began

    def _note_left_out(self) -> None:
        if self._left_out is not None:
            self._noted.append(self._left_out)
            self._left_out = None

    def _run(self) -> None:
        while not self._closing.wait(_PAUSE_SECONDS):
            self.flush()

    @contextmanager
    def _drop_on_error(self, sink: Sink) -> Iterator[None]:
        """Drop a sink that raises anything, as not all sinks are gtopk's; the others go on."""
        try:
            yield
        except Exception as error:
            self._sinks.remove(sink)
            reason = f"{type(error).__name__}: {error}"
            _log.warning("%s ends here, as %s; training goes on", sink.name, reason)


class _MessageHandler(logging.Handler):
    """Passes the library's log messages to the recorder."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def emit(self, record: logging.LogRecord) -> None:
        self._recorder.note("message", level=record.levelname, text=record.getMessage())


# Steps: a sample takes about twice the time of a step's selection.
_SAMPLED_EVERY: Final = 50


def is_sampling_due(steps: int) -> bool:
    """Tell whether to sample the residual: after 1, 2, 4, ... 32 steps, and then every 50."""
    return steps % _SAMPLED_EVERY == 0 or (steps < _SAMPLED_EVERY and steps & (steps - 1) == 0)


def note_residual(
    recorder: Recorder | None, steps: int | None, bucket_exchanges: Sequence[AnyBucketExchange]
) -> None:
    """Sample these buckets' residual, where there is a record and it is time.

    steps: how many steps counted so far; None: the last one does not count.
    """
    if recorder is not None and steps is not None and is_sampling_due(steps):
        sample_residual(recorder, bucket_exchanges)


def sample_residual(recorder: Recorder, bucket_exchanges: Sequence[AnyBucketExchange]) -> None:
    """Note the norm of this rank's whole residual, and its age.

    The age is how many steps like the last would send as much: sum |residual| / sum |sent|. By
    Little's law that is how many steps sent entries have waited on average, if nothing cancels out.
    """
    found = [
        each
        for bucket_exchange in bucket_exchanges
        if (each := bucket_exchange.residual_size()) is not None
    ]
    if not found:
        return
    square, mass, sent = map(sum, zip(*found, strict=True))
    recorder.note("withheld", norm=math.sqrt(square), age_steps=mass / sent if sent else None)

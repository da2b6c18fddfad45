"""Recorder: collects a rank's steps and events, and writes them to sinks from its own thread.

Residual sampling: records the residual's norm at some steps only, because it reads all of it.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Final, Protocol

from ..exchange.sparse_gradients import AnyBucketExchange
from .lines import Line, step_line
from .step_report import StepReport

_log = logging.getLogger("gtopk")

StepEntry = tuple[StepReport, float, int, int]  # the arguments of step_line
# Between two writes; a killed rank may lose the lines of this time.
_PAUSE_SECONDS: Final = 0.2


class Sink(Protocol):
    """A destination of lines: a file, a tracker, or a script's own, for `gtopk.record(sinks=)`.

    name: its name in messages.
    Lines are dicts of plain values, described in `gtopk.telemetry.lines`; `scalars_of` yields the
    names and numbers of a line. The recorder's thread calls `take` five times a second. A sink that
    raises is closed and dropped, with a warning; training goes on.
    """

    name: str

    def take(self, lines: Sequence[Line]) -> None:
        """Receive lines, in chronological order."""

    def close(self) -> None:
        """Finish; no more lines follow."""


class Recorder:
    """Collects events from any thread of the program; its own thread writes them to the sinks.

    began: a time of time.perf_counter; events are timed in seconds since then.
    every: write only every Nth step.
    step:  returns the number of steps that this rank has finished.
    """

    def __init__(
        self, sinks: Sequence[Sink], begin: Line, began: float, every: int, step: Callable[[], int]
    ) -> None:
        self._sinks = list(sinks)
        self._began, self._every, self._step = began, every, step
        # Appends and pops of a deque are atomic, so training needs no lock to record.
        self._pending: deque[Line | StepEntry] = deque([begin])
        self._bytes = self._samples = self._steps = 0
        self._logged_samples: int | None = None  # logged by the script for the current step
        self._unwritten_step: StepEntry | None = None  # the last step, if `every` skips it
        # Reentrant: a SIGTERM handler may end the record while its own thread is in another write.
        self._writing = threading.RLock()
        self._closing = threading.Event()
        self._ended = False
        self._handler = _MessageHandler(self)
        _log.addHandler(self._handler)
        self._thread = threading.Thread(target=self._run, name="gtopk-recorder", daemon=True)
        self._thread.start()

    def note_step(self, report: StepReport) -> None:
        """Record a step, with the script's number of samples if the report has none."""
        if report.samples is None:
            report = replace(report, samples=self._logged_samples)
        self._logged_samples = None
        self._bytes += report.sent_bytes
        self._samples += report.samples or 0
        self._steps += 1
        entry = (report, self._now(), self._bytes, self._samples)
        # Always write skipped steps, which are rare, and the first, to show that the record works.
        if self._steps % self._every == 0 or report.skipped or self._steps == 1:
            self._unwritten_step = None
            self._pending.append(entry)
        else:
            self._unwritten_step = entry

    def note_samples(self, count: int) -> None:
        """Add to the samples of the current step."""
        self._logged_samples = (self._logged_samples or 0) + count

    def note(self, what: str, **content: Any) -> None:
        """Record a line of this kind; `lines` describes the kinds and their fields."""
        line = {"what": what, "seconds": self._now(), "step": self._step(), **content}
        self._pending.append(line)

    def end(self, how: str, in_order: bool = True) -> None:
        """Write the last step, all pending lines and how this rank leaves, now.

        Only the first call's reason is recorded.
        """
        if not self._ended:
            self._ended = True
            self._queue_unwritten_step()
            self.note("end", how=how, in_order=in_order)
        self.flush()

    def flush(self) -> None:
        """Write all pending lines now."""
        with self._writing:
            lines: list[Line] = []
            while self._pending:
                note = self._pending.popleft()
                lines.append(note if isinstance(note, dict) else step_line(*note))
            if lines:
                for sink in list(self._sinks):
                    with self._drop_on_error(sink):
                        sink.take(lines)
                        continue
                    # It may hold a file or a port; the warning has said that it fails.
                    with suppress(Exception):
                        sink.close()

    def close(self) -> list[Sink]:
        """Write the last step and all pending lines, and stop.

        Returns the sinks left open for a run that continues in another world (`continues`).
        """
        if self._closing.is_set():
            return []
        if not self._ended:
            self._queue_unwritten_step()
        # Stop collecting before the join and the last flush: nothing may be added in between.
        self._closing.set()
        _log.removeHandler(self._handler)
        self._thread.join()
        self.flush()
        with self._writing:
            # Keep sinks open only without an end, which also ends their run.
            kept = [s for s in self._sinks if not self._ended and getattr(s, "continues", False)]
            for sink in [s for s in self._sinks if s not in kept]:
                with self._drop_on_error(sink):
                    sink.close()
            self._sinks.clear()
        return kept

    def _now(self) -> float:
        return time.perf_counter() - self._began

    def _queue_unwritten_step(self) -> None:
        if self._unwritten_step is not None:
            self._pending.append(self._unwritten_step)
            self._unwritten_step = None

    def _run(self) -> None:
        while not self._closing.wait(_PAUSE_SECONDS):
            self.flush()

    @contextmanager
    def _drop_on_error(self, sink: Sink) -> Iterator[None]:
        """Drop a sink that raises anything; scripts bring their own sinks. The others continue."""
        try:
            yield
        except Exception as error:
            self._sinks.remove(sink)
            reason = f"{type(error).__name__}: {error}"
            _log.warning("%s stopped (%s); training continues", sink.name, reason)


class _MessageHandler(logging.Handler):
    """Passes the library's log messages to the recorder."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def emit(self, record: logging.LogRecord) -> None:
        self._recorder.note("message", level=record.levelname, text=record.getMessage())


# In steps: a sample takes about twice as long as a step's selection.
_SAMPLED_EVERY: Final = 50


def is_sampling_due(steps: int) -> bool:
    """Tell whether to sample the residual: after 1, 2, 4, ... 32 steps, then every 50 steps."""
    return steps % _SAMPLED_EVERY == 0 or (steps < _SAMPLED_EVERY and steps & (steps - 1) == 0)


def note_residual(
    recorder: Recorder | None, steps: int | None, bucket_exchanges: Sequence[AnyBucketExchange]
) -> None:
    """Sample these buckets' residual if the run is recorded and a sample is due.

    steps: the number of steps so far; None if the last one does not count.
    """
    if recorder is not None and steps is not None and is_sampling_due(steps):
        sample_residual(recorder, bucket_exchanges)


def sample_residual(recorder: Recorder, bucket_exchanges: Sequence[AnyBucketExchange]) -> None:
    """Record the norm of this rank's whole residual, and its age.

    The age is the number of steps like the last that would send it: sum |residual| / sum |sent|. By
    Little's law, sent entries have waited this many steps on average, if nothing cancels out.
    """
    sizes = [
        each
        for bucket_exchange in bucket_exchanges
        if (each := bucket_exchange.residual_size()) is not None
    ]
    if not sizes:
        return
    square, mass, sent = map(sum, zip(*sizes, strict=True))
    recorder.note("withheld", norm=math.sqrt(square), age_steps=mass / sent if sent else None)

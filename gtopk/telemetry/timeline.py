"""The timeline: a trace of a rank's engine, for Chrome and Perfetto.

    HOROVOD_TIMELINE=FILE       traces rank 0, from init on; DYNAMIC: from start_timeline on
    HOROVOD_TIMELINE_MARK_CYCLES=1
    hvd.start_timeline(FILE), hvd.stop_timeline()
    GTOPK_TIMELINE=DIR          traces every rank, DIR/timeline-00000.json; `gtopk timeline DIR`
                                merges the files on rank 0's clock

Each operation has a row:

    allreduce.weight   |NEGOTIATE_ALLREDUCE........|ALLREDUCE                                      |
                          0        2         1     |MEMCPY_IN_..|MPI_ALLREDUCE..|MEMCPY_OUT_...|
                          the rank that became ready

Each optimizer has a row for its steps, and a counter of the exchange time that backward hid:

    steps of weight    |BACKWARD........................|     |SYNCHRONIZE|
    hidden ms, exposed ms

In the modes of `adapt` where ranks step independently, the row shows rounds, mega-batches or
periods:

    each round of weight   |ROUND..........................|ROUND................|
                           |COMPUTE........|WAIT|COMPUTE...|COMPUTE.........|WAIT|

The file is valid JSON after every write, even if the job dies: new records overwrite the closing
bracket and end with another one. A full disk ends the trace, not the job.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import queue
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

from .. import settings
from ..runtime.coordinator import Engine, Event, Observer
from ..runtime.coordinator.clocks import Offset
from ..runtime.world.membership import World, WorldObserver

_log = logging.getLogger("gtopk")
_LIBRARY: Final = {"mpi": "MPI", "torch.distributed": "GLOO", "nccl": "NCCL"}
_END: Final = b"\n]\n"
RANK: Final = "gtopk_rank"  # the record with the trace's rank and run


class Span(NamedTuple):
    """A named time span of a rank; times are from time.perf_counter.

    args: values that the viewer shows with it.
    """

    what: str
    began: float
    ended: float
    args: Mapping[str, Any] = {}


class Step(NamedTuple):
    """An optimizer step of a rank on the timeline, or several steps reported as one.

    name:    the name of the optimizer's operations.
    spans:   disjoint or nested.
    working: the engine thread's time; hidden: its part while the program was working, too.
    kind:    for the row's name: "steps", "each round".
    """

    name: str
    spans: Sequence[Span]
    working_seconds: float
    hidden_seconds: float
    kind: str = "steps"


class TraceSource(NamedTuple):
    """The rank and run of a trace.

    run: the run's begin in Unix seconds, equal on all its ranks; it identifies the run.
    """

    rank: int
    ranks: int
    run: float
    clock: Offset


class Timeline:
    """Writes the events of engines from its own thread."""

    def __init__(
        self, path: str, transport: str, mark_cycles: bool, source: TraceSource | None = None
    ) -> None:
        """source: the rank and run, for a trace to merge with those of other ranks."""
        self._library = _LIBRARY.get(transport, transport.upper())
        self._mark_cycles = mark_cycles
        self._begun = time.perf_counter()
        self._rows: dict[str, int] = {}
        self._open: Counter[int] = Counter()  # by row: spans that have begun but not ended
        self._is_over = False  # after an error, such as a full disk
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        # The length excludes the closing bracket, which the next records overwrite. After the empty
        # record, each of them can begin with a comma.
        self._length = os.pwrite(self._file, b"[\n{}" + _END, 0) - len(_END)
        if source is not None:
            metadata = {
                "rank": source.rank,
                "ranks": source.ranks,
                "run": source.run,
                "host": socket.gethostname(),
                "began_seconds": self._begun - source.clock.ahead_seconds,  # on rank 0's clock
                "uncertain_seconds": source.clock.uncertain_seconds,
            }
            self._append([{"ph": "M", "name": RANK, "pid": 0, "tid": 0, "args": metadata}])
        self._watched: list[tuple[Engine, Observer]] = []
        self._events: queue.SimpleQueue[tuple[str, Event] | Step | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="gtopk-timeline", daemon=True)
        self._thread.start()

    def watch(self, engine: Engine, suffix: str = "") -> None:
        """Start to write an engine's events; rows are named after its operations, with the suffix.

        Operations that are unfinished when the timeline ends have no end in it.
        """
        observer = partial(self.note, suffix)
        engine.add_observer(observer)
        self._watched.append((engine, observer))

    def note(self, suffix: str, event: Event) -> None:
        """Record an event of an engine; must be fast, because the engine's thread calls it."""
        if not self._is_over:
            self._events.put((suffix, event))

    def note_step(self, step: Step) -> None:
        """Record a step of an optimizer."""
        if not self._is_over:
            self._events.put(step)

    def close(self) -> None:
        """Write all recorded events, and stop."""
        # Before the None is queued: the writer reads nothing behind it.
        for engine, observer in self._watched:
            engine.remove_observer(observer)
        self._events.put(None)
        self._thread.join()

    def _write(self) -> None:
        is_open = True
        while is_open:
            # Take everything that is queued, to write a burst of events at once.
            notes = [self._events.get()]
            while not self._events.empty():
                notes.append(self._events.get())
            is_open = None not in notes
            records: list[dict[str, Any]] = []
            for note in notes:
                if isinstance(note, Step):
                    records += self._step_records(note)
                elif note is not None:
                    records += self._records(*note)
            self._append(records)
        os.close(self._file)

    def _append(self, records: list[dict[str, Any]]) -> None:
        text = "".join(f",\n{json.dumps(record)}" for record in records).encode()
        if self._is_over or not text:
            return
        try:
            if os.pwrite(self._file, text + _END, self._length) < len(text + _END):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._length += len(text)
        except OSError as error:
            self._is_over = True
            _log.warning("the timeline stopped (%s); training continues", error)
            # Drop the partial write and restore the end, so that the file stays valid JSON.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._length)
                os.pwrite(self._file, _END, self._length)

    def _step_records(self, step: Step) -> Iterator[dict[str, Any]]:
        name = f"{step.kind} of {step.name.removeprefix('gradients.')}"
        if name not in self._rows:
            yield from self._new_row(name)
        place = {"pid": self._rows[name], "tid": self._rows[name]}
        for span in step.spans:
            # Round both ends, so that nested and consecutive spans stay so.
            began, ended = self._microseconds(span.began), self._microseconds(span.ended)
            at = {"ts": began, "dur": round(ended - began, 1)}
            yield {"ph": "X", "name": span.what, **at, **place, "args": dict(span.args)}
        if step.working_seconds:
            exposed_seconds = step.working_seconds - step.hidden_seconds
            shown = {"hidden ms": step.hidden_seconds * 1e3, "exposed ms": exposed_seconds * 1e3}
            at = {"ts": self._microseconds(max(span.ended for span in step.spans))}
            # Viewers merge counters with the same name and process. In a merged trace each rank is
            # a process.
            yield {"ph": "C", "name": f"exchange in {name}", **at, **place, "args": shown}

    def _microseconds(self, seconds: float) -> float:
        """Convert a time from time.perf_counter to microseconds since the timeline began."""
        return round((seconds - self._begun) * 1e6, 1)

    def _records(self, suffix: str, event: Event) -> Iterator[dict[str, Any]]:
        """Yield an event's records in Chrome's format."""
        at = {"ts": self._microseconds(event.seconds)}
        if event.what == "cycle":
            if self._mark_cycles:
                yield {"ph": "i", "name": "CYCLE_START", **at, "s": "g", "pid": 0, "tid": 0}
            return
        name = event.name + suffix
        if name not in self._rows:
            yield from self._new_row(name)
        row = self._rows[name]
        place = {"pid": row, "tid": row}
        if event.what == "ready":
            yield {"ph": "X", "name": str(event.rank), **at, "dur": 0, **place}
        elif event.phase == "begin":
            self._open[row] += 1
            yield {"ph": "B", "name": self._label(event), **at, **place}
        # Skip the end of a span that began before the timeline: it would close another span.
        elif self._open[row]:
            self._open[row] -= 1
            yield {"ph": "E", **at, **place}

    def _new_row(self, name: str) -> Iterator[dict[str, Any]]:
        row = self._rows[name] = len(self._rows) + 1
        place = {"pid": row, "tid": row}
        yield {"ph": "M", "name": "process_name", **place, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", **place, "args": {"sort_index": row}}

    def _label(self, event: Event) -> str:
        """Return Horovod's name for the activity that begins."""
        kind = event.name.partition(".")[0].upper()
        return {
            "negotiate": f"NEGOTIATE_{kind}",
            "execute": kind,
            "copy-in": "MEMCPY_IN_FUSION_BUFFER",
            "reduce": f"{self._library}_{kind}",
            "copy-out": "MEMCPY_OUT_FUSION_BUFFER",
        }[event.what]


# The timeline of each world that is recorded.
timelines: Final[WeakKeyDictionary[World, Timeline]] = WeakKeyDictionary()


def start(world: World, path: str, mark_cycles: bool = False) -> None:
    """Start a timeline in a file, on rank 0; end one under way."""
    if world.rank == 0:
        stop(world)  # first: it may still write to the same file
        _start(world, Timeline(path, world.transport.name, mark_cycles))


def _start(world: World, timeline: Timeline) -> None:
    timelines[world] = timeline
    for number in world.sets:
        _watch(world, number)


def _watch(world: World, number: int) -> None:
    """Also record a process set, if the world is recorded and this rank is in the set."""
    engine, timeline = world.sets[number].engine, timelines.get(world)
    if timeline is not None and engine is not None:
        timeline.watch(engine, f" (process set {number})" if number else "")


def stop(world: World) -> None:
    """End the timeline under way, if any."""
    timeline = timelines.pop(world, None)
    if timeline is not None:
        timeline.close()


class WorldTimelines(WorldObserver):
    """Starts the timeline that GTOPK_TIMELINE or HOROVOD_TIMELINE names."""

    def join(self, world: World, previous: World | None) -> bool:
        return settings.TIMELINE.read() != ""

    def start(self, world: World) -> None:
        path, cycles = settings.HOROVOD_TIMELINE.read(), settings.MARK_CYCLES.read()
        where = settings.TIMELINE.read()
        try:
            if where:
                folder, name = Path(where), world.transport.name
                folder.mkdir(parents=True, exist_ok=True)
                file = str(path_of(folder, world.rank))
                source = TraceSource(world.rank, world.size, world.began_unix_seconds, world.clock)
                _start(world, Timeline(file, name, cycles, source))
            elif path not in ("", "DYNAMIC"):
                start(world, path, cycles)
        except OSError as error:
            setting = settings.TIMELINE if where else settings.HOROVOD_TIMELINE
            what = "folder to write to" if where else "file to write"
            _log.warning("%s must name a %s, got %s", setting.name, what, error)

    def open_set(self, world: World, number: int) -> None:
        _watch(world, number)

    def leave(self, world: World) -> None:
        stop(world)


def path_of(folder: Path, rank: int) -> Path:
    return folder / f"timeline-{rank:05d}.json"

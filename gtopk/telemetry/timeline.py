"""The timeline: a trace of a rank's engine, for Chrome and Perfetto.

    HOROVOD_TIMELINE=FILE       of rank 0, from init on; DYNAMIC: when the program says so
    HOROVOD_TIMELINE_MARK_CYCLES=1
    hvd.start_timeline(FILE), hvd.stop_timeline()
    GTOPK_TIMELINE=DIR          of every rank, DIR/timeline-00000.json; `gtopk timeline DIR` puts
                                them together on rank 0's clock

A row for each operation:

    allreduce.weight   |NEGOTIATE_ALLREDUCE........|ALLREDUCE                                      |
                          0        2         1     |MEMCPY_IN_..|MPI_ALLREDUCE..|MEMCPY_OUT_...|
                          the rank that became ready

and one for the steps of each optimizer, with a counter of the exchange's time that backward hid:

    steps of weight    |BACKWARD........................|     |SYNCHRONIZE|
    hidden ms, exposed ms

In the modes of `adapt` whose optimizers step as they can, for each round, mega-batch or period:

    each round of weight   |ROUND..........................|ROUND................|
                           |COMPUTE........|WAIT|COMPUTE...|COMPUTE.........|WAIT|

The file is complete JSON after every write, also when the job dies: new records are written over
the closing bracket, and end with another one. A full disk ends the trace, not the job.
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
RANK: Final = "gtopk_rank"  # the record that tells whose trace it is


class Span(NamedTuple):
    """A named time span of a rank, by time.perf_counter.

    said: values shown beside it.
    """

    what: str
    began: float
    ended: float
    said: Mapping[str, Any] = {}


class Step(NamedTuple):
    """A rank's step of an optimizer on the timeline, or several reported as one.

    name:    of the optimizer's operations.
    spans:   side by side, or one within another.
    working: of the engine's thread; hidden: of that, while the program was at work, too.
    kind:    of its row: "steps", "each round".
    """

    name: str
    spans: Sequence[Span]
    working_seconds: float
    hidden_seconds: float
    kind: str = "steps"


class TraceSource(NamedTuple):
    """The rank and run of a trace.

    run: when the run began, in seconds of Unix: the same on all its ranks, and on no other run's.
    """

    rank: int
    ranks: int
    run: float
    clock: Offset


class Timeline:
    """Writes the events of engines, by a thread of its own."""

    def __init__(
        self, path: str, transport: str, mark_cycles: bool, whose: TraceSource | None = None
    ) -> None:
        """whose: for a trace that is to be merged with those of other ranks."""
        self._library = _LIBRARY.get(transport, transport.upper())
        self._mark_cycles = mark_cycles
        self._begun = time.perf_counter()
        self._rows: dict[str, int] = {}
        self._open: Counter[int] = Counter()  # by row: spans that have begun and not ended
        self._is_over = False  # the disk is full, say
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        # Without the closing bracket, over which the next records are written. The empty record
        # first lets each of them begin with a comma.
        self._length = os.pwrite(self._file, b"[\n{}" + _END, 0) - len(_END)
        if whose is not None:
            told = {
                "rank": whose.rank,
                "ranks": whose.ranks,
                "run": whose.run,
                "host": socket.gethostname(),
                "began_seconds": self._begun - whose.clock.ahead_seconds,  # on rank 0's clock
                "uncertain_seconds": whose.clock.uncertain_seconds,
            }
            self._append([{"ph": "M", "name": RANK, "pid": 0, "tid": 0, "args": told}])
        self._watched: list[tuple[Engine, Observer]] = []
        self._events: queue.SimpleQueue[tuple[str, Event] | Step | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="gtopk-timeline", daemon=True)
        self._thread.start()

    def watch(self, engine: Engine, of: str = "") -> None:
        """Write an engine's events from now on; its rows are named by its operations, and `of`.

        Operations that are unfinished when the timeline ends have no end in it.
        """
        observer = partial(self.note, of)
        engine.add_observer(observer)
        self._watched.append((engine, observer))

    def note(self, of: str, event: Event) -> None:
        """Note an event of an engine; quick, as the engine's thread calls it."""
        if not self._is_over:
            self._events.put((of, event))

    def note_step(self, step: Step) -> None:
        """Note a step of an optimizer."""
        if not self._is_over:
            self._events.put(step)

    def close(self) -> None:
        """Write all noted events, and stop."""
        # Before the None, behind which nothing is read.
        for engine, observer in self._watched:
            engine.remove_observer(observer)
        self._events.put(None)
        self._thread.join()

    def _write(self) -> None:
        goes_on = True
        while goes_on:
            # All that waits at once: a burst of events is one write to the file.
            heard = [self._events.get()]
            while not self._events.empty():
                heard.append(self._events.get())
            goes_on = None not in heard
            records: list[dict[str, Any]] = []
            for note in heard:
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
            _log.warning("the timeline ends here, as %s; training goes on", error)
            # Drop the part that fitted, and restore the end: what was written before stays JSON.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._length)
                os.pwrite(self._file, _END, self._length)

    def _step_records(self, step: Step) -> Iterator[dict[str, Any]]:
        name = f"{step.kind} of {step.name.removeprefix('gradients.')}"
        if name not in self._rows:
            yield from self._new_row(name)
        place = {"pid": self._rows[name], "tid": self._rows[name]}
        for span in step.spans:
            # Both ends are rounded, so that spans within another, or after it, stay so.
            began, ended = self._microseconds(span.began), self._microseconds(span.ended)
            at = {"ts": began, "dur": round(ended - began, 1)}
            yield {"ph": "X", "name": span.what, **at, **place, "args": dict(span.said)}
        if step.working_seconds:
            exposed_seconds = step.working_seconds - step.hidden_seconds
            shown = {"hidden ms": step.hidden_seconds * 1e3, "exposed ms": exposed_seconds * 1e3}
            at = {"ts": self._microseconds(max(span.ended for span in step.spans))}
            # Counters of one name and process are one; in a trace of all ranks a rank is a process.
            yield {"ph": "C", "name": f"exchange in {name}", **at, **place, "args": shown}

    def _microseconds(self, seconds: float) -> float:
        """Return a time of time.perf_counter as one since the timeline began."""
        return round((seconds - self._begun) * 1e6, 1)

    def _records(self, of: str, event: Event) -> Iterator[dict[str, Any]]:
        """Yield the records of Chrome's format for an event."""
        at = {"ts": self._microseconds(event.seconds)}
        if event.what == "cycle":
            if self._mark_cycles:
                yield {"ph": "i", "name": "CYCLE_START", **at, "s": "g", "pid": 0, "tid": 0}
            return
        name = event.name + of
        if name not in self._rows:
            yield from self._new_row(name)
        row = self._rows[name]
        place = {"pid": row, "tid": row}
        if event.what == "ready":
            yield {"ph": "X", "name": str(event.rank), **at, "dur": 0, **place}
        elif event.phase == "begin":
            self._open[row] += 1
            yield {"ph": "B", "name": self._label(event), **at, **place}
        # Else the span began before the timeline: an end without a begin would close another one.
        elif self._open[row]:
            self._open[row] -= 1
            yield {"ph": "E", **at, **place}

    def _new_row(self, name: str) -> Iterator[dict[str, Any]]:
        row = self._rows[name] = len(self._rows) + 1
        place = {"pid": row, "tid": row}
        yield {"ph": "M", "name": "process_name", **place, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", **place, "args": {"sort_index": row}}

    def _label(self, event: Event) -> str:
        """Return Horovod's name for the activity that has begun."""
        kind = event.name.partition(".")[0].upper()
        return {
            "negotiate": f"NEGOTIATE_{kind}",
            "execute": kind,
            "copy-in": "MEMCPY_IN_FUSION_BUFFER",
            "reduce": f"{self._library}_{kind}",
            "copy-out": "MEMCPY_OUT_FUSION_BUFFER",
        }[event.what]


# Of each world whose operations have one.
timelines: Final[WeakKeyDictionary[World, Timeline]] = WeakKeyDictionary()


def start(world: World, path: str, mark_cycles: bool = False) -> None:
    """Start a timeline in a file, on rank 0; one under way ends."""
    if world.rank == 0:
        _start(world, Timeline(path, world.transport.name, mark_cycles))


def _start(world: World, timeline: Timeline) -> None:
    stop(world)
    timelines[world] = timeline
    for number in world.sets:
        _watch(world, number)


def _watch(world: World, number: int) -> None:
    """Record a process set, too, if the world is recorded and this rank is in it."""
    engine, timeline = world.sets[number].engine, timelines.get(world)
    if timeline is not None and engine is not None:
        timeline.watch(engine, f" (process set {number})" if number else "")


def stop(world: World) -> None:
    """Finish the timeline under way, if there is one."""
    timeline = timelines.pop(world, None)
    if timeline is not None:
        timeline.close()


class WorldTimelines(WorldObserver):
    """Starts the timeline that GTOPK_TIMELINE or HOROVOD_TIMELINE names."""

    def join(self, world: World, before: World | None) -> bool:
        return settings.TIMELINE.read() != ""

    def start(self, world: World) -> None:
        path, cycles = settings.HOROVOD_TIMELINE.read(), settings.MARK_CYCLES.read()
        where = settings.TIMELINE.read()
        try:
            if where:
                folder, name = Path(where), world.transport.name
                folder.mkdir(parents=True, exist_ok=True)
                file = str(path_of(folder, world.rank))
                whose = TraceSource(world.rank, world.size, world.began_unix_seconds, world.clock)
                _start(world, Timeline(file, name, cycles, whose))
            elif path not in ("", "DYNAMIC"):
                start(world, path, cycles)
        except OSError as error:
            asked = settings.TIMELINE if where else settings.HOROVOD_TIMELINE
            what = "folder to write to" if where else "file to write"
            _log.warning("%s must name a %s, got %s", asked.name, what, error)

    def open_set(self, world: World, number: int) -> None:
        _watch(world, number)

    def leave(self, world: World) -> None:
        stop(world)


def path_of(folder: Path, rank: int) -> Path:
    return folder / f"timeline-{rank:05d}.json"

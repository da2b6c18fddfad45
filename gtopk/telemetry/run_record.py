"""The record of a run: `gtopk.record`, `gtopk.log` and `gtopk.log_samples`, and their settings.

This module starts and ends a world's recording. It also watches the logged loss: if it rises in a
compressed run, rank 0 warns once.
"""

from __future__ import annotations

import logging
import math
import operator
import os
import platform
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch

from collectives.cores import usable_cores

from .. import __version__
from .. import settings as variables
from ..errors import page
from ..exchange.sparse_gradients import AnyBucketExchange
from ..runtime.coordinator.clocks import agree_on_now, clock_offset
from ..runtime.machine import processor
from ..runtime.world import world
from ..runtime.world.membership import World, WorldObserver, register
from ..settings import Address, parse_address
from . import timeline
from .lines import FORMAT, LARGEST_VALUE, Line, as_text, path_of
from .reading import has_ended
from .recorder import Recorder, Sink, note_residual
from .sinks import Endpoint, MLflow, Scalars, Wandb
from .step_report import Balance, StepReport

_log = logging.getLogger("gtopk")


class Settings(NamedTuple):
    """The sinks that a rank records to; nothing is recorded if all are empty.

    run:         the folder of the run's record.
    every:       write only every Nth step.
    tensorboard: the folder for TensorBoard's scalars.
    wandb:       the project at Weights & Biases.
    mlflow:      the experiment at MLflow.
    prometheus:  the address of local rank 0's endpoint; the other local ranks use the next ports.
    """

    run: str = ""
    every: int = 1
    tensorboard: str = ""
    prometheus: Address | None = None
    wandb: str = ""
    mlflow: str = ""

    @property
    def is_enabled(self) -> bool:
        """Tell whether to record anything."""
        return any(self._replace(every=0))


def settings_from() -> Settings:
    """Return the settings from the environment; raise ValueError for invalid ones."""
    return Settings(
        variables.RUN.read(),
        variables.RUN_EVERY.read(),
        variables.TENSORBOARD.read(),
        variables.PROMETHEUS.read(),
        variables.WANDB.read(),
        variables.MLFLOW.read(),
    )


class LineFile:
    """Appends lines to a file, with one write per call, so that readers see whole lines."""

    name = "the record"

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        length = os.fstat(self._file).st_size
        # End the line of a killed writer: ours must not become part of it.
        if length and os.pread(self._file, 1, length - 1) != b"\n":
            os.write(self._file, b"\n")

    def take(self, lines: Sequence[Line]) -> None:
        content = memoryview("".join(map(as_text, lines)).encode())
        while content:
            content = content[os.write(self._file, content) :]

    def close(self) -> None:
        os.close(self._file)


_written: Final[set[Path]] = set()


@dataclass
class _Records:
    """The recording of a world.

    settings:    from the environment or the script.
    recorder:    the recorder of its steps; None if nothing is recorded.
    recorded_to: the folders that it was recorded to so far.
    balance:     the cost of compression so far, compared with dense gradients.
    kept_open:   sinks of the previous world with runs that continue in this one.
    """

    settings: Settings
    recorder: Recorder | None = None
    recorded_to: set[str] = field(default_factory=set)
    balance: Balance = field(default_factory=Balance)
    kept_open: list[Sink] = field(default_factory=list)


_records: Final[WeakKeyDictionary[World, _Records]] = WeakKeyDictionary()


def _records_of(world: World) -> _Records:
    found = _records.get(world)
    # The world was created before this module was imported and registered its observer.
    if found is None:
        found = _records[world] = _Records(settings_from())
    return found


def recorder_of(world: World) -> Recorder | None:
    """Return the recorder of a world's steps; None if they are not recorded."""
    return _records_of(world).recorder


def balance_of(world: World) -> Balance:
    """Return the cost of compression in a world so far, compared with dense gradients."""
    return _records_of(world).balance


def note_step(
    world: World,
    step: StepReport,
    steps: int | None = None,
    bucket_exchanges: Sequence[AnyBucketExchange] = (),
) -> None:
    """Count a step in the balance, and record it; see `note_residual` for the other arguments."""
    balance_of(world).note(step)
    if (recorder := recorder_of(world)) is not None:
        recorder.note_step(step)
        note_residual(recorder, steps, bucket_exchanges)


def settings_of(world: World) -> Settings:
    """Return the record settings of a world."""
    return _records_of(world).settings


def start(world: World, settings: Settings, script_sinks: Sequence[Sink] = ()) -> None:
    """Start to record this rank; a recording under way ends.

    script_sinks: sinks that the script made.
    Raises OSError if a file or an endpoint cannot be opened, ImportError if a requested package is
    not installed.
    """
    if (recorder := recorder_of(world)) is not None:
        recorder.end("recording moved to another destination")
    _pause(world)
    _log_earlier_run(world, settings)
    # If one cannot be opened, close the earlier ones.
    with ExitStack() as opened:
        sinks = []
        for open_sink in _sink_openers(world, settings).values():
            sinks.append(open_sink())
            opened.callback(sinks[-1].close)
        opened.pop_all()
    _records_of(world).settings = settings
    _record(world, [*sinks, *script_sinks])


class _WorldRecords(WorldObserver):
    """Starts the recording that the environment or the previous world requests."""

    def join(self, world: World, previous: World | None) -> bool:
        settings = settings_from() if previous is None else settings_of(previous)
        kept_open = [] if previous is None else _records_of(previous).kept_open
        _records[world] = _Records(settings, kept_open=kept_open)
        return settings.is_enabled

    def start(self, world: World) -> None:
        """Start the requested recording; if that fails, warn and let training go on."""
        settings = settings_of(world)
        _log_earlier_run(world, settings)
        records = _records_of(world)
        kept_open = [*records.kept_open]
        # The previous world shares this list, and would close the sinks that continue here.
        records.kept_open.clear()
        sinks: list[Sink] = []
        for variable, open_sink in _sink_openers(world, settings).items():
            continuing = [sink for sink in kept_open if type(sink) is open_sink.func]
            # Only if rank 0 is the same process: a different one has begun its own run.
            if continuing and world.rank == 0:
                sinks += continuing[:1]
                continue
            try:
                sinks.append(open_sink())
            except Exception as error:  # a tracker may raise anything
                _log.warning(
                    "rank %d trains without the sink of %s: %s", world.rank, variable, error
                )
        for sink in (each for each in kept_open if each not in sinks):
            _close(sink)
        _record(world, sinks)

    def resume(self, world: World) -> None:
        if (recorder := recorder_of(world)) is not None:
            recorder.note("resumed")

    def pause(self, world: World) -> None:
        _pause(world)

    def end(self, world: World, how: str, in_order: bool) -> None:
        records = _records_of(world)
        link = world.transport.link_text
        if in_order and world.rank == 0 and (verdict := records.balance.verdict(link)):
            _log.info("%s", verdict)
            records.balance = Balance()  # log the verdict only once
        if (recorder := recorder_of(world)) is not None:
            recorder.end(how, in_order)
        # Sinks remain here if the next world, which was to continue them, was never set up.
        while records.kept_open:
            end = {"what": "end", "seconds": 0.0, "step": world.step}
            _close(records.kept_open.pop(), [{**end, "how": how, "in_order": in_order}])


def _close(sink: Sink, lines: Sequence[Line] = ()) -> None:
    """Write these lines to a sink and close it, outside a recorder; warn of errors."""
    try:
        with closing(sink):
            if lines:
                sink.take(lines)
    except Exception as error:  # a tracker may raise anything
        _log.warning("%s could not be closed (%s); training continues", sink.name, error)


def _sink_openers(world: World, settings: Settings) -> dict[str, partial[Any]]:
    """Return functions that open the requested sinks, by each one's environment variable."""
    found: dict[str, partial[Any]] = {}
    if settings.run:
        found[variables.RUN.name] = partial(LineFile, path_of(settings.run, world.rank))
    if settings.prometheus is not None:
        host, port = settings.prometheus
        address = Address(host, port + world.local_rank if port else 0)
        found[variables.PROMETHEUS.name] = partial(Endpoint, address, world.rank)
    of_rank_0: dict[str, tuple[str, Callable[[str], Sink]]] = {
        variables.TENSORBOARD.name: (settings.tensorboard, Scalars),
        variables.WANDB.name: (settings.wandb, Wandb),
        variables.MLFLOW.name: (settings.mlflow, MLflow),
    }
    for variable, (where, sink_type) in of_rank_0.items():
        if where and world.rank == 0:
            found[variable] = partial(sink_type, where)
    return found


def _log_earlier_run(world: World, settings: Settings) -> None:
    """Log on rank 0 that a folder holds a finished run, unless this process wrote it."""
    path = path_of(settings.run, world.rank) if settings.run else None
    if world.rank or world.resumed or path is None or path in _written:
        return
    _written.add(path)
    if has_ended(path):
        _log.info(
            "'%s' holds the record of an earlier run, and this run is appended: `gtopk report` "
            "shows both as one if this run resumes from a checkpoint, else only this run; use a "
            "separate folder for each run to see both",
            settings.run,
        )


def _record(world: World, sinks: list[Sink]) -> None:
    if sinks:
        records, began = _records_of(world), time.perf_counter()
        every = records.settings.every
        records.recorder = Recorder(sinks, _begin(world, began), began, every, lambda: world.step)
        records.recorded_to.add(records.settings.run)
        if world.resumed:
            records.recorder.note("resumed")


def _pause(world: World) -> None:
    """Write all pending lines without an end: the run continues in another world."""
    records = _records_of(world)
    if records.recorder is not None:
        records.kept_open = records.recorder.close()
        records.recorder = None


def _begin(world: World, began: float) -> Line:
    records = _records_of(world)
    return {
        "what": "begin",
        "format": FORMAT,
        "rank": world.rank,
        "ranks": world.size,
        "local_rank": world.local_rank,
        "step": world.step,
        "every": records.settings.every,
        "again": records.settings.run in records.recorded_to,
        "seconds": began - world.clock.ahead_seconds,  # on rank 0's clock
        "clock_uncertain_seconds": world.clock.uncertain_seconds,
        "began_unix_seconds": world.began_unix_seconds,  # equal on all ranks
        "unix_seconds": time.time(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "processor": processor(),
        "cores": usable_cores(),
        "transport": world.transport.name,
        "library": world.transport.library(),
        "link": world.transport.link_text,
        "gtopk": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


# Importing any module that records registers both, so that every world is observed.
register(timeline.WorldTimelines())
register(_WorldRecords())


WINDOW: Final = 20  # values of the loss that are averaged
# Watch only the beginning of a run, when compression is most likely to make it diverge.
_MAX_WINDOWS: Final = 100
# In standard errors: noise does not explain a larger rise.
_SIGMAS: Final = 4.0
_RISE: Final = 0.05  # of the lowest mean; smaller rises are ignored


def record(
    folder: str = "",
    *,
    every: int = 1,
    tensorboard: str = "",
    prometheus: str = "",
    wandb: str = "",
    mlflow: str = "",
    sinks: Sequence[Sink] = (),
) -> None:
    """Start to record this run, as GTOPK_RUN and related variables do; every rank must call it.

    folder: for a file of each rank, which `gtopk report` and `gtopk top` read; "" for none.
    every: write only every Nth step.
    tensorboard: the folder for TensorBoard's scalars of rank 0.
    wandb, mlflow: the project at Weights & Biases and the experiment at MLflow for the same
        scalars. They go to the run that rank 0's script has begun, or to a new one.
    prometheus: "PORT" on this host only, or "HOST:PORT"; local rank r uses PORT + r.
    sinks: the script's own sinks for this rank's lines, see `gtopk.telemetry.Sink`.
    Raises OSError if a sink cannot be opened, ImportError if a package is not installed, ValueError
    for an invalid address or number.
    """
    if every < 1:
        raise ValueError(f"every must be at least 1 step, got {every}")
    try:
        address = parse_address(prometheus) if prometheus else None
    except ValueError as error:
        raise ValueError(f"prometheus must be {error}, got {prometheus!r}") from None
    settings = Settings(folder, every, tensorboard, address, wandb, mlflow)
    here = world.current()
    # All ranks compare clocks again: they may have drifted since `init`, or were never compared.
    here.clock, here.began_unix_seconds = here.engine.submit(
        "clocks", [], lambda t, all_flags: (clock_offset(t), agree_on_now(t))
    ).wait()
    start(here, settings, sinks)


def log(**values: Any) -> None:
    """Log values of the last step, such as loss=0.31, accuracy=0.92, to the run's record.

    Pass this rank's numbers, or tensors with one element. Plots and TensorBoard show those of rank
    0. Without a record nothing is written. A tensor on a GPU makes the program wait for it. Values
    that are not finite, or beyond 1e300, are recorded as not finite. Raises ValueError for an empty
    name, TypeError for anything but a number.

    Even without a record, rank 0 warns once if `loss` rises within its first 2,000 logged values in
    a compressed run.
    """
    if "" in values:
        raise ValueError('values must have a name, got "": use log(loss=0.31), for example')
    for name, value in values.items():
        # Do not convert it to a float here, which would wait for a GPU.
        size = value.numel() if isinstance(value, torch.Tensor) else np.size(value)
        if size != 1 or not hasattr(value, "__float__"):
            raise TypeError(
                f"log({name}=...) takes a number, or a tensor of one, got {value!r:.80}"
            )
    if not world.is_initialized():
        return
    here = world.current()
    if here.rank == 0 and "loss" in values:
        watch = _watches.setdefault(here, LossWatch())
        if balance_of(here).compresses and (warning := watch.note(values["loss"], here.step)):
            _log.warning("%s", warning)
    recorder = recorder_of(here)
    if recorder is not None:
        recorder.note("values", values={name: _number(each) for name, each in values.items()})


def log_samples(count: int) -> None:
    """Add to the samples (or tokens) of this rank's current step, for the run's record.

    Call it before the batch's backward pass. Samples add up over several backward passes, and over
    the steps between two exchanges of LocalSGD. They do not weight gradients, and the numbers from
    `adapt` and `set_num_samples` take precedence. Without a record this does nothing. Raises
    ValueError for a negative number, TypeError for one that is not an integer.
    """
    samples = operator.index(count)
    if samples < 0:
        raise ValueError(f"the number of samples must be at least 0, got {samples}")
    if not world.is_initialized():
        return
    recorder = recorder_of(world.current())
    if recorder is not None:
        recorder.note_samples(samples)


def _number(value: Any) -> float:
    try:
        return float(value.detach() if isinstance(value, torch.Tensor) else value)
    except OverflowError:  # an integer too large for a float
        return math.inf


class _Window(NamedTuple):
    """Consecutive values of the loss: mean, standard error, and the step of the last value."""

    mean: float
    error: float
    step: int


class LossWatch:
    """Detects a rising loss: two consecutive windows exceed the lowest one by more than noise."""

    def __init__(self) -> None:
        self._values: list[Any] = []
        self._windows = 0
        self._lowest: _Window | None = None
        self._higher = 0  # consecutive higher windows
        self.is_over = False  # it has warned, or has watched all windows

    def note(self, value: Any, step: int) -> str:
        """Add a number, or a tensor with one element; return a warning, or "".

        Tensors are read when a window is full, to wait for a GPU only once in 20 steps.
        """
        if self.is_over:
            return ""
        # Detached, or the loss would keep its graph and all activations alive.
        self._values.append(value.detach() if isinstance(value, torch.Tensor) else value)
        if len(self._values) < WINDOW:
            return ""
        # Drop values that `log` records as not finite: their sums may overflow.
        values = [each for each in map(_number, self._values) if abs(each) <= LARGEST_VALUE]
        self._values = []
        self._windows += 1
        self.is_over = self._windows >= _MAX_WINDOWS
        if len(values) < WINDOW // 2:
            return ""  # skipped steps have their own warnings
        error = statistics.stdev(values) / math.sqrt(len(values))
        now = _Window(statistics.fmean(values), error, step)
        lowest = self._lowest
        if lowest is None or now.mean < lowest.mean:
            self._lowest, self._higher = now, 0
            return ""
        rise = now.mean - lowest.mean
        is_rise = rise > max(_SIGMAS * math.hypot(error, lowest.error), _RISE * abs(lowest.mean))
        self._higher = self._higher + 1 if is_rise else 0
        if self._higher < 2:
            return ""
        self.is_over = True
        return (
            f"the loss has risen: its mean over {WINDOW} steps was {lowest.mean:.4g} at step "
            f"{lowest.step}, and is {now.mean:.4g} at step {step}. Compression makes the first "
            "steps of a training fragile: begin with a lower learning rate, or ramp it up more "
            f"slowly (gtopk.ramp), and compare with a dense run ({page('Tuning')})"
        )


_watches: Final[WeakKeyDictionary[World, LossWatch]] = WeakKeyDictionary()

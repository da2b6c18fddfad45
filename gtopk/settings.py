"""Settings: every environment variable that gtopk reads, with its type, its default and its check.

    settings.TIMEOUT.read()      600.0, or the seconds that GTOPK_TIMEOUT says

The environment is read at each call, and nowhere else in gtopk; `collectives.environment` reads the
three variables of `collectives`, and `launch` reads launchers'. An empty variable counts as unset.
`python docs/make/settings.py` makes the tables of docs/reference/settings.md from `SECTIONS`.

This module imports neither NumPy nor torch: `gtopk doctor` and the companions run without them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, NamedTuple, TypeVar

from .units import bandwidth, duration

T = TypeVar("T")


@dataclass(frozen=True)
class Setting(Generic[T]):
    """An environment variable.

    name:    of the variable.
    about:   its row on the reference page, in Markdown.
    parse:   makes the value from the text; raises ValueError for another text, with the expected
             form as in ValueError("a number of seconds above 0").
    default: its value where the variable is unset or empty.
    shown:   the default on the reference page, in Markdown.
    """

    name: str
    about: str
    parse: Callable[[str], T]
    default: T
    shown: str

    def read(self, environ: Mapping[str, str] = os.environ) -> T:
        """Return the value; raise ValueError, which names the variable, for an invalid text."""
        text = environ.get(self.name)
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            raise ValueError(f"{self.name} must be {error}, got {text!r}") from None

    def text(self, environ: Mapping[str, str] = os.environ) -> str:
        """Return the variable's text, unchecked; "" where it is unset."""
        return environ.get(self.name, "")

    def take(self) -> str:
        """Return the variable's text, unchecked, and unset it: a child must not inherit it."""
        return os.environ.pop(self.name, "")


class Section:
    """A section of the reference page; its methods make settings, and add them to it."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.settings: list[Setting[Any]] = []

    def add(self, setting: Setting[T]) -> Setting[T]:
        """Add a setting, and return it."""
        self.settings.append(setting)
        return setting

    def text(self, name: str, about: str, shown: str = "unset") -> Setting[str]:
        """Return a setting that is any text; unset: ""."""
        return self.add(Setting(name, about, str, "", shown))

    def number(
        self, name: str, about: str, default: float, unit: str, *, may_be_zero: bool = False
    ) -> Setting[float]:
        """Return a setting that is a finite number of `unit`."""

        def parse(text: str) -> float:
            try:
                value = float(text)
            except ValueError:
                # It fails the comparison below, and so gets the same words.
                value = math.nan
            if not 0 <= value < math.inf or (value == 0 and not may_be_zero):
                least = ", at least 0" if may_be_zero else " above 0"
                raise ValueError(f"a number of {unit}{least}")
            return value

        return self.add(Setting(name, about, parse, default, f"{default:.0f}"))

    def whole(self, name: str, about: str, default: int, unit: str) -> Setting[int]:
        """Return a setting that counts `unit` from 1 on."""

        def parse(text: str) -> int:
            # int() would also take "1_0", "+1" and spaces.
            if not text.isdecimal() or int(text) < 1:
                raise ValueError(f"a whole number of {unit}, at least 1")
            return int(text)

        return self.add(Setting(name, about, parse, default, str(default)))

    def zero_or_one(self, name: str, about: str) -> Setting[bool]:
        """Return a setting that is 0 or 1; unset: 0."""

        def parse(text: str) -> bool:
            if text not in ("0", "1"):
                raise ValueError("0 or 1")
            return text == "1"

        return self.add(Setting(name, about, parse, False, "0"))

    def switch(self, name: str, about: str, default: bool, shown: str) -> Setting[bool]:
        """Return a setting that off, 0, false and no switch off, and anything else on."""

        def parse(text: str) -> bool:
            return text.lower() not in ("off", "0", "false", "no")

        return self.add(Setting(name, about, parse, default, shown))


class EmulatedLink(NamedTuple):
    """The link that each rank is to have, in both directions."""

    bits_per_second: float
    latency_seconds: float


def parse_link(text: str) -> EmulatedLink:
    """Return the link that a text such as "100mbit" or "1gbit,0.4ms" names; ValueError for others.

    Without a latency in the text, none is added to this machine's own.
    """
    rate, comma, latency = text.partition(",")
    try:
        return EmulatedLink(bandwidth(rate), duration(latency.lower()) if comma else 0.0)
    except ValueError:
        raise ValueError(
            "a rate above 0 and, after a comma, a latency if it has one, such as 100mbit, 1gbit "
            "or 100mbit,0.4ms"
        ) from None


JOINING: Final = Section("How ranks are joined, and how they talk")

TRANSPORT: Final = JOINING.text(  # checked where transports are opened: `world.joining`
    "GTOPK_TRANSPORT",
    "[the transport](#the-transport) that joins the ranks: `mpi`, `torch.distributed`, `horovod` "
    "or `local`; or `nccl` or `staged`, over the one that the launcher implies",
    "as the launcher implies",
)
START_TIMEOUT: Final = JOINING.number(
    "GTOPK_START_TIMEOUT", "seconds that all ranks get to reach `init`", 120.0, "seconds"
)
TIMEOUT: Final = JOINING.number(
    "GTOPK_TIMEOUT", "seconds that an operation waits for a living rank", 600.0, "seconds"
)
HEARTBEAT_TIMEOUT: Final = JOINING.number(
    "GTOPK_HEARTBEAT_TIMEOUT",
    "seconds until a stopped or silent rank is given up; 0: no heartbeat, no companions, no port. "
    "Equal on all ranks",
    30.0,
    "seconds",
    may_be_zero=True,
)
INTERFACE: Final = JOINING.text(
    "GTOPK_INTERFACE",
    "the network interface that heartbeats use",
    "[chosen](../reliability.md#how-a-fault-is-noticed)",
)
ALLOW_PICKLE: Final[Setting[bool]] = JOINING.add(
    Setting(
        "GTOPK_ALLOW_PICKLE",
        "`1`: objects that are not plain data travel as pickles, where both sides have it. Then "
        "whoever can send to a rank can execute code there",
        # Anything else is no: an error would come in the middle of an exchange.
        lambda text: text == "1",
        False,
        "0; `1` under `python -m gtopk.as_horovod`",
    )
)
CHECK_MESSAGES: Final = JOINING.zero_or_one(
    "GTOPK_CHECK_MESSAGES",
    "`1`: [a checksum on every message](../reliability.md#a-checksum-on-every-message). Equal on "
    "all ranks",
)

LINK: Final[Setting[EmulatedLink | None]] = JOINING.add(
    Setting(
        "GTOPK_LINK",
        "[an emulated link](../recipes/slow-ethernet.md#feel-it-on-one-machine) for every rank, on "
        "one host: `100mbit`, `1gbit`, `100mbit,0.4ms`. Equal on all ranks",
        parse_link,
        None,
        "unset",
    )
)

COMPUTING: Final = Section("What computes")

KERNELS: Final = COMPUTING.text(  # read by `collectives.environment`, as the next two are
    "GTOPK_KERNELS", "`reference`: NumPy", "the C++ core where built"
)
THREADS: Final = COMPUTING.text(
    "GTOPK_THREADS",
    "threads that select and merge",
    "this rank's share of its cores (by affinity, container and SLURM), at most 8",
)
CHECK_GRADIENTS: Final = COMPUTING.zero_or_one(
    "GTOPK_CHECK_GRADIENTS",
    "`1`: any change of a gradient on the host by `.data` or NumPy while its bucket is on its way "
    "makes the exchange begin again, at the cost of reading gradients twice. Changes that torch "
    "counts, and a factor that all values have, are always noticed",
)
CALIBRATION: Final = COMPUTING.text(
    "GTOPK_CALIBRATION",
    "[measured links](#the-calibration): `off`, `fresh`, or the path of a file that keeps them. "
    "Rank 0's counts",
    "kept for a week",
)
SIMGRID_PYTHON: Final = COMPUTING.text(
    "GTOPK_SIMGRID_PYTHON",
    "the Python that has SimGrid, for `gtopk plan --simulate`",
    "this Python, or the system's",
)

RECORDS: Final = Section("What is recorded and logged")

RUN: Final = RECORDS.text(
    "GTOPK_RUN",
    "a folder in which every rank records its steps, for `gtopk report` and `gtopk top`",
)
FAILURE_DIR: Final = RECORDS.text(
    "GTOPK_FAILURE_DIR",
    "a folder for [what a rank failed with](../reliability.md#what-a-rank-leaves-behind); without "
    "either variable nothing is written",
    "the folder of `GTOPK_RUN`",
)
RUN_EVERY: Final = RECORDS.whole(
    "GTOPK_RUN_EVERY",
    "record one step of so many, and the last; bytes and samples are counted in all of them",
    1,
    "steps",
)
TENSORBOARD: Final = RECORDS.text(
    "GTOPK_TENSORBOARD", "a folder for scalars of rank 0, where tensorboard is installed"
)
WANDB: Final = RECORDS.text(
    "GTOPK_WANDB",
    "a project at Weights & Biases for scalars of rank 0, where wandb is installed; in the run "
    "that the script has begun by then, if it has",
)
MLFLOW: Final = RECORDS.text(
    "GTOPK_MLFLOW",
    "an experiment at MLflow for scalars of rank 0, where mlflow is installed; in the run that is "
    "active by then, if one is",
)
PROMETHEUS: Final = RECORDS.text(  # checked where it is used: `telemetry.sinks.parse_address`
    "GTOPK_PROMETHEUS",
    "`PORT` or `HOST:PORT`: each rank answers at that port + its local rank, on the loopback "
    "unless HOST says otherwise",
)
TIMELINE: Final = RECORDS.text(
    "GTOPK_TIMELINE",
    "a folder for a trace of every rank (Chrome's format), for `gtopk timeline`",
)
ADVICE: Final = RECORDS.switch(
    "GTOPK_ADVICE",
    "`off`: no line at the start of a run on what compression saves here, and nothing but `auto` "
    "predicts exchanges",
    True,
    "on",
)


def _parse_level(text: str) -> str:
    if (level := text.lower()) not in ("debug", "info", "warning", "error", "off"):
        raise ValueError("one of debug, info, warning, error, off")
    return level


LOG: Final = RECORDS.add(
    Setting(
        "GTOPK_LOG",
        "the least that is logged: `debug`, `info`, `warning`, `error`, `off`; for all ranks alike",
        _parse_level,
        "",
        "rank 0: info, others: warnings",
    )
)

FAULTS: Final = Section("Going on after a fault")

ELASTIC_DIR: Final = FAULTS.text(
    "GTOPK_ELASTIC_DIR",
    "the folder in which commits of `hvd.elastic` are kept; on every rank or none",
)
ELASTIC_KEEP: Final = FAULTS.whole(
    "GTOPK_ELASTIC_KEEP", "how many commits are kept there", 2, "commits"
)

HOROVOD: Final = Section("Horovod's, with its meaning")

HOROVOD_TIMELINE: Final = HOROVOD.text(
    "HOROVOD_TIMELINE",
    "a file for rank 0's timeline (Chrome's trace format); `DYNAMIC`: from `hvd.start_timeline` on",
)
MARK_CYCLES: Final = HOROVOD.switch(
    "HOROVOD_TIMELINE_MARK_CYCLES", "1: cycles are marked in it", False, "0"
)
STALL_CHECK_TIME: Final = HOROVOD.number(
    "HOROVOD_STALL_CHECK_TIME_SECONDS",
    "seconds until a warning names the rank that others wait for; 0: never",
    60.0,
    "seconds",
    may_be_zero=True,
)
STALL_SHUTDOWN_TIME: Final = HOROVOD.number(
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    "seconds until the job is ended for it; 0: never",
    0.0,
    "seconds",
    may_be_zero=True,
)
STALL_CHECK_DISABLE: Final = HOROVOD.switch(
    "HOROVOD_STALL_CHECK_DISABLE", "1: neither a warning nor an end of the job", False, "0"
)
CYCLE_TIME: Final = HOROVOD.number(
    "HOROVOD_CYCLE_TIME",
    "milliseconds to wait, after an operation is submitted, for more of its burst",
    1.0,
    "milliseconds",
    may_be_zero=True,
)
CACHE_CAPACITY: Final = HOROVOD.number(
    "HOROVOD_CACHE_CAPACITY",
    "names that are known by a number; the least of all ranks' counts",
    1024.0,
    "names",
    may_be_zero=True,
)
FUSION_THRESHOLD: Final = HOROVOD.number(
    "HOROVOD_FUSION_THRESHOLD",
    "bytes of tensors that are reduced as one; 0: none are",
    float(64 << 20),
    "bytes",
    may_be_zero=True,
)
DYNAMIC_PROCESS_SETS: Final = HOROVOD.switch(
    "HOROVOD_DYNAMIC_PROCESS_SETS", "1: process sets can be added and removed later", False, "0"
)

CHILDREN: Final = Section("From gtopk to the processes that it starts")

RUN_ADDRESS: Final = CHILDREN.text(
    "GTOPK_RUN_ADDRESS", "where a rank of gtopk.run fetches its call"
)
RUN_SECRET: Final = CHILDREN.text("GTOPK_RUN_SECRET", "the key that it proves itself with there")
RUN_OUTPUT: Final = CHILDREN.text("GTOPK_RUN_OUTPUT", "the folder for what the ranks print")
JOB: Final = CHILDREN.text("GTOPK_JOB", "marks the processes of a job, so that none outlives it")
JOINED: Final = CHILDREN.text(
    "GTOPK_JOINED", "the process that is its launcher's rank: its children are none"
)
AS_HOROVOD_MAIN: Final = CHILDREN.text(
    "GTOPK_AS_HOROVOD_MAIN", "JSON: the script's path, or null; its module, or null"
)

SECTIONS: Final[dict[str, tuple[Setting[Any], ...]]] = {
    section.title: tuple(section.settings)
    for section in (JOINING, COMPUTING, RECORDS, FAULTS, HOROVOD, CHILDREN)
}

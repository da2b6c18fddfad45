"""Settings: every environment variable that gtopk reads, with its type, its default and its check.

    settings.TIMEOUT.read()      600.0, or the seconds in GTOPK_TIMEOUT

The environment is read at each call, and nowhere else in gtopk, with two exceptions:
`collectives.environment` reads the three variables of `collectives`, and `launch` reads launchers'.
An empty variable counts as unset. `python docs/make/settings.py` generates the tables of
docs/reference/settings.md from `SECTIONS`.

This module imports neither NumPy nor torch: `gtopk doctor` and the companions run without them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Generic, NamedTuple, TypeVar

from .units import bandwidth, duration

T = TypeVar("T")

# The system's and gloo's waits take no more: their clocks count nanoseconds in 64 bits.
_LONGEST: Final = 1e9  # seconds, or milliseconds
_LARGEST: Final = 1e15  # bytes, or names; in a message they have 64 bits
_MOST_DIGITS: Final = 15

_SWITCHES: Final = {
    **dict.fromkeys(("1", "on", "true", "yes"), True),
    **dict.fromkeys(("0", "off", "false", "no"), False),
}


@dataclass(frozen=True)
class Setting(Generic[T]):
    """An environment variable.

    name:    the variable's name.
    about:   its description on the reference page, in Markdown.
    parse:   converts the text to the value. For invalid text it raises ValueError with the expected
             form, as in ValueError("a number of seconds above 0").
    default: the value if the variable is unset or empty.
    shown:   the default as the reference page shows it, in Markdown.
    """

    name: str
    about: str
    parse: Callable[[str], T]
    default: T
    shown: str

    def read(self) -> T:
        """Return the value; raise a ValueError that names the variable if the text is invalid."""
        text = os.environ.get(self.name)
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            raise ValueError(f"{self.name} must be {error}, got {text!r}") from None

    def text(self) -> str:
        """Return the variable's text, unchecked; "" if it is unset."""
        return os.environ.get(self.name, "")

    def take(self) -> str:
        """Return the variable's text, unchecked, and unset it so that no child inherits it."""
        return os.environ.pop(self.name, "")


class Section:
    """A section of the reference page; its methods create settings and add them to it."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.settings: list[Setting[Any]] = []

    def add(self, setting: Setting[T]) -> Setting[T]:
        """Add a setting, and return it."""
        self.settings.append(setting)
        return setting

    def text(self, name: str, about: str, shown: str = "unset") -> Setting[str]:
        """Return a setting with any text as its value; unset: ""."""
        return self.add(Setting(name, about, str, "", shown))

    def number(
        self,
        name: str,
        about: str,
        default: float,
        unit: str,
        *,
        may_be_zero: bool = False,
        most: float = _LONGEST,
    ) -> Setting[float]:
        """Return a setting whose value is a number of `unit`, at most `most`."""

        def parse(text: str) -> float:
            try:
                value = float(text)
            except ValueError:
                value = math.nan  # fails the comparison below, which raises the error
            if not 0 <= value < math.inf or (value == 0 and not may_be_zero):
                least = ", at least 0" if may_be_zero else " above 0"
                raise ValueError(f"a number of {unit}{least}")
            if value > most:
                raise ValueError(f"a number of {unit}, at most {most:g}")
            return value

        return self.add(Setting(name, about, parse, default, f"{default:.0f}"))

    def whole(self, name: str, about: str, default: int, unit: str) -> Setting[int]:
        """Return a setting whose value is a whole number of `unit`, at least 1."""

        return self.add(Setting(name, about, _parse_whole(unit), default, str(default)))

    def zero_or_one(self, name: str, about: str, shown: str = "0") -> Setting[bool]:
        """Return a setting whose text must be 0 or 1; unset: 0."""

        def parse(text: str) -> bool:
            if text not in ("0", "1"):
                raise ValueError("0 or 1")
            return text == "1"

        return self.add(Setting(name, about, parse, False, shown))

    def switch(self, name: str, about: str, default: bool, shown: str) -> Setting[bool]:
        """Return a setting that is on or off; its text may be 1 or 0, and other usual words."""

        def parse(text: str) -> bool:
            if text.isdecimal() and len(text) <= _MOST_DIGITS:
                return int(text) > 0  # as in Horovod
            if (word := text.lower()) not in _SWITCHES:
                raise ValueError(f"one of {', '.join(_SWITCHES)}")
            return _SWITCHES[word]

        return self.add(Setting(name, about, parse, default, shown))


def _parse_whole(unit: str) -> Callable[[str], int]:
    """Return a function that converts the text of a whole number of `unit`, at least 1."""

    def parse(text: str) -> int:
        # int() would also take "1_0", "+1" and spaces, and refuse thousands of digits.
        if text.isdecimal() and len(text) > _MOST_DIGITS:
            raise ValueError(f"a whole number of {unit}, of at most {_MOST_DIGITS} digits")
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(f"a whole number of {unit}, at least 1")
        return int(text)

    return parse


class EmulatedLink(NamedTuple):
    """The bandwidth and latency to emulate for each rank's link, in both directions."""

    bits_per_second: float
    latency_seconds: float


def parse_link(text: str) -> EmulatedLink:
    """Parse a link such as "100mbit" or "1gbit,0.4ms"; raise ValueError for any other text.

    If the text has no latency, no latency is added.
    """
    rate, comma, latency = text.partition(",")
    try:
        return EmulatedLink(bandwidth(rate), duration(latency.lower()) if comma else 0.0)
    except ValueError:
        raise ValueError(
            "a rate above 0 and, after a comma, an optional latency, such as 100mbit, 1gbit or "
            "100mbit,0.4ms"
        ) from None


class Address(NamedTuple):
    """An address to listen on."""

    host: str
    port: int


_LOOPBACK: Final = "127.0.0.1"


def parse_address(text: str) -> Address:
    """Parse "9400" (this host only) or "HOST:9400"; raise ValueError for any other text."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or len(port) > _MOST_DIGITS or int(port) > 65535:
        raise ValueError("PORT or HOST:PORT, such as 9400")
    # IPv6 addresses are in brackets, as in URLs.
    return Address(host.strip("[]") or _LOOPBACK, int(port))


JOINING: Final = Section("Joining ranks, and communication")

TRANSPORT: Final = JOINING.text(  # checked where transports are opened: `world.joining`
    "GTOPK_TRANSPORT",
    "[the transport](#the-transport) that joins the ranks: `mpi`, `torch.distributed`, `horovod` "
    "or `local`; or `nccl` or `staged`, on top of the launcher's transport",
    "the launcher's",
)
START_TIMEOUT: Final = JOINING.number(
    "GTOPK_START_TIMEOUT", "seconds within which all ranks must reach `init`", 120.0, "seconds"
)
TIMEOUT: Final = JOINING.number(
    "GTOPK_TIMEOUT", "seconds that an operation waits for a rank that is alive", 600.0, "seconds"
)
HEARTBEAT_TIMEOUT: Final = JOINING.number(
    "GTOPK_HEARTBEAT_TIMEOUT",
    "seconds until a stopped or silent rank is considered lost; 0: no heartbeat, no companions, no "
    "port. Equal on all ranks",
    30.0,
    "seconds",
    may_be_zero=True,
)
INTERFACE: Final = JOINING.text(
    "GTOPK_INTERFACE",
    "the network interface that heartbeats use",
    "[chosen](../reliability.md#how-a-fault-is-noticed)",
)
ALLOW_PICKLE: Final = JOINING.zero_or_one(
    "GTOPK_ALLOW_PICKLE",
    "`1` on both sides: objects that are not plain data are sent as pickles. Whoever can send "
    "to a rank can then execute code there",
    "0; `1` under `python -m gtopk.as_horovod`",
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

COMPUTING: Final = Section("Computation")

KERNELS: Final = COMPUTING.text(  # `collectives.environment` reads this one and the next two
    "GTOPK_KERNELS", "`reference`: NumPy", "the C++ core where built"
)
THREADS: Final = COMPUTING.add(
    Setting(
        "GTOPK_THREADS",
        "threads that select and merge",
        _parse_whole("threads"),
        0,
        "this rank's share of its cores (by affinity, container and SLURM), at most 8",
    )
)
CHECK_GRADIENTS: Final = COMPUTING.zero_or_one(
    "GTOPK_CHECK_GRADIENTS",
    "`1`: restart a bucket's exchange if a gradient on the host was changed through `.data` or "
    "NumPy meanwhile; this reads gradients twice. Changes that torch counts, and a factor common "
    "to all values, are always noticed",
)
CALIBRATION: Final = COMPUTING.text(
    "GTOPK_CALIBRATION",
    "[the measurements of links](#the-calibration): `off`, `fresh`, or the path of a file that "
    "keeps them. Only rank 0's value counts",
    "kept for a week",
)
SIMGRID_PYTHON: Final = COMPUTING.text(
    "GTOPK_SIMGRID_PYTHON",
    "the Python interpreter with SimGrid, for `gtopk plan --simulate`",
    "this Python, or the system's",
)

RECORDS: Final = Section("Records and logs")

RUN: Final = RECORDS.text(
    "GTOPK_RUN",
    "a folder in which every rank records its steps, for `gtopk report` and `gtopk top`",
)
FAILURE_DIR: Final = RECORDS.text(
    "GTOPK_FAILURE_DIR",
    "a folder for [failure files](../reliability.md#what-a-rank-leaves-behind); if neither "
    "variable is set, none are written",
    "the folder of `GTOPK_RUN`",
)
RUN_EVERY: Final = RECORDS.whole(
    "GTOPK_RUN_EVERY",
    "record every n-th step, and the last; bytes and samples are counted in all steps",
    1,
    "steps",
)
TENSORBOARD: Final = RECORDS.text(
    "GTOPK_TENSORBOARD", "a folder for rank 0's scalars; needs tensorboard"
)
WANDB: Final = RECORDS.text(
    "GTOPK_WANDB",
    "a Weights & Biases project for rank 0's scalars; needs wandb. If the script has already "
    "begun a run, they go to that run",
)
MLFLOW: Final = RECORDS.text(
    "GTOPK_MLFLOW",
    "an MLflow experiment for rank 0's scalars; needs mlflow. If a run is already active, they go "
    "to that run",
)
PROMETHEUS: Final[Setting[Address | None]] = RECORDS.add(
    Setting(
        "GTOPK_PROMETHEUS",
        "`PORT` or `HOST:PORT`: each rank serves its metrics at that port plus its local rank; "
        "without HOST on the loopback interface only",
        parse_address,
        None,
        "unset",
    )
)
TIMELINE: Final = RECORDS.text(
    "GTOPK_TIMELINE",
    "a folder for a trace of every rank (Chrome's format), for `gtopk timeline`",
)
ADVICE: Final = RECORDS.switch(
    "GTOPK_ADVICE",
    "`off`: do not log at the start of a run how much compression saves here; only `auto` then "
    "predicts exchange times",
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
        "the log level of all ranks: `debug`, `info`, `warning`, `error`, `off`",
        _parse_level,
        "",
        "`info` on rank 0, `warning` on others",
    )
)

FAULTS: Final = Section("Recovery after a fault")

ELASTIC_DIR: Final = FAULTS.text(
    "GTOPK_ELASTIC_DIR",
    "the folder for the commits of `hvd.elastic`; set it on every rank or on none",
)
ELASTIC_KEEP: Final = FAULTS.whole(
    "GTOPK_ELASTIC_KEEP", "how many commits to keep there", 2, "commits"
)

HOROVOD: Final = Section("Horovod's variables, with the same meaning")

HOROVOD_TIMELINE: Final = HOROVOD.text(
    "HOROVOD_TIMELINE",
    "a file for rank 0's timeline (Chrome's trace format); `DYNAMIC`: wait for "
    "`hvd.start_timeline`",
)
MARK_CYCLES: Final = HOROVOD.switch(
    "HOROVOD_TIMELINE_MARK_CYCLES", "`1`: mark cycles in the timeline", False, "0"
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
    "seconds until a stalled job is ended; 0: never",
    0.0,
    "seconds",
    may_be_zero=True,
)
STALL_CHECK_DISABLE: Final = HOROVOD.switch(
    "HOROVOD_STALL_CHECK_DISABLE", "`1`: a stall neither warns nor ends the job", False, "0"
)
CYCLE_TIME: Final = HOROVOD.number(
    "HOROVOD_CYCLE_TIME",
    "milliseconds to wait after an operation is submitted, so that more can be fused with it",
    1.0,
    "milliseconds",
    may_be_zero=True,
)
CACHE_CAPACITY: Final = HOROVOD.number(
    "HOROVOD_CACHE_CAPACITY",
    "how many operation names to cache, so that ranks announce them by number; the smallest value "
    "of all ranks counts",
    1024.0,
    "names",
    may_be_zero=True,
    most=_LARGEST,
)
FUSION_THRESHOLD: Final = HOROVOD.number(
    "HOROVOD_FUSION_THRESHOLD",
    "the most bytes of tensors to reduce together; 0: reduce each tensor by itself",
    float(64 << 20),
    "bytes",
    may_be_zero=True,
    most=_LARGEST,
)
DYNAMIC_PROCESS_SETS: Final = HOROVOD.switch(
    "HOROVOD_DYNAMIC_PROCESS_SETS",
    "`1`: process sets can be added and removed after `init`",
    False,
    "0",
)

CHILDREN: Final = Section("Internal: from gtopk to the processes that it starts")

RUN_ADDRESS: Final = CHILDREN.text(
    "GTOPK_RUN_ADDRESS", "the address from which a rank of gtopk.run fetches its call"
)
RUN_SECRET: Final = CHILDREN.text(
    "GTOPK_RUN_SECRET", "the key with which the rank authenticates there"
)
RUN_OUTPUT: Final = CHILDREN.text("GTOPK_RUN_OUTPUT", "the folder for the ranks' output")
JOB: Final = CHILDREN.text("GTOPK_JOB", "marks the processes of a job, so that none outlives it")
JOINED: Final = CHILDREN.text(
    "GTOPK_JOINED", "the id of the process that is the launcher's rank; its children are not ranks"
)
AS_HOROVOD_MAIN: Final = CHILDREN.text(
    "GTOPK_AS_HOROVOD_MAIN", "JSON: the path of the script, or null; its module, or null"
)

SECTIONS: Final[dict[str, tuple[Setting[Any], ...]]] = {
    section.title: tuple(section.settings)
    for section in (JOINING, COMPUTING, RECORDS, FAULTS, HOROVOD, CHILDREN)
}


def check_all() -> None:
    """Raise a ValueError that names the first variable with an invalid text, if there is one."""
    for settings in SECTIONS.values():
        for setting in settings:
            setting.read()

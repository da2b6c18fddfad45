"""Board: a row for each worker of a node, in shared memory, with its counts and its device class.

A worker's device class decides how it updates the model, and its batch sizes.

Only its worker writes a row, eight bytes at a time; everybody reads all of them at any time. The
worker that prepares the round of an evaluation clears its sums in all rows.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from collectives.transports.node_memory import NodeMemory


class DeviceClass(NamedTuple):
    """A kind of worker.

    is_fast: it computes on a copy of the parameters, in large batches, and evaluates losses; else
        on the shared model itself, in small ones.
    """

    name: str
    is_fast: bool


CLASSES: Final[Mapping[str, DeviceClass]] = {
    "cpu": DeviceClass("cpu", is_fast=False),
    "gpu": DeviceClass("gpu", is_fast=True),
    # Ranks on CPUs that stand for the two, to try the modes without a GPU.
    "slow": DeviceClass("slow", is_fast=False),
    "fast": DeviceClass("fast", is_fast=True),
}
NAMES: Final = tuple(CLASSES)  # the number of a class in shared memory is its place here


def class_named(name: str) -> DeviceClass:
    """Return a class; raise ValueError for a name there is none of."""
    if name not in CLASSES:
        raise ValueError(f"a device class must be one of {', '.join(CLASSES)}, got {name!r}")
    return CLASSES[name]


def class_of(parameters: Sequence[torch.Tensor], name: str | None) -> DeviceClass:
    """Return this worker's class: the one it names, else by the device of its parameters.

    Raises ValueError where the parameters' devices do not go with it.
    """
    devices = sorted({parameter.device.type for parameter in parameters})
    if devices not in (["cpu"], ["cuda"]):
        raise ValueError(
            "a worker of hogbatch computes on one device, the CPU or a GPU; its parameters are on "
            f"{', '.join(devices)}"
        )
    on_gpu = devices == ["cuda"]
    chosen = class_named(name or ("gpu" if on_gpu else "cpu"))
    if on_gpu != (chosen.name == "gpu"):
        raise ValueError(
            f"a worker of device class {chosen.name!r} must have its parameters on "
            f"{'a GPU' if chosen.name == 'gpu' else 'the CPU'}, and they are on {devices[0]}"
        )
    return chosen


WORDS_BYTES, AMISS_BYTES = 160, 480
HEAD: Final = np.dtype(
    {
        "names": [
            "prepared",
            "next",
            "end",
            "base",
            "turn",
            "merged",
            "smallest",
            "what",
            "amiss",
            "is_amiss",
        ],
        # smallest: a batch, by device class; what a round is; what keeps all from going on
        "formats": [
            *["i8"] * 6,
            f"({len(CLASSES)},)i8",
            f"S{WORDS_BYTES}",
            f"S{AMISS_BYTES}",
            "i8",
        ],
        "itemsize": 1024,
    }
)
_WORDS: Final = (
    "kind",  # the device class
    "idle",  # the last round in which nothing was left in its hands
    "over",  # the last round it has ended
    "updates",
    "samples",
    "unused",  # batches that the script took no step for
    "skipped",  # updates that were not finite
    "taken_over",  # samples that others had in hand, who died or broke off
    "overlapped",  # updates during which another worker wrote, too
    "writes_begun",  # to the model
    "writes_ended",
    "staleness",  # sum, over the updates, of others' updates since the batch was handed out
    "stalest",
    "size",  # of its next batch
    "smallest",
    "largest",
    "busy",  # nanoseconds from hand-overs to the ends of steps
    "in_rounds",  # nanoseconds within rounds
)
# Rows in cache lines of their own: neighbours would slow each other down.
ROW: Final = np.dtype(
    {
        "names": [*_WORDS, "losses", "evaluated"],  # an evaluation's sums, by parity of rounds
        "formats": ["i8"] * len(_WORDS) + ["(2,)f8", "(2,)i8"],
        "itemsize": 256,
    }
)


class Board:
    """The rows, and what is common to all.

    rows: ROW [workers]; head: HEAD [1]; me: this worker's place.
    """

    def __init__(self, memory: NodeMemory, first_byte: int = 0) -> None:
        self._memory = memory
        rows = first_byte + HEAD.itemsize
        self.head = memory.bytes[first_byte:rows].view(HEAD)
        end = rows + memory.places * ROW.itemsize
        self.rows: np.ndarray[Any, Any] = memory.bytes[rows:end].view(ROW)
        self.me = memory.place

    @staticmethod
    def size_bytes(workers: int) -> int:
        """Return how many bytes a board takes."""
        return HEAD.itemsize + workers * ROW.itemsize

    def __getitem__(self, word: str) -> int:
        """Return a word of this worker's row."""
        return int(self.rows[word][self.me])

    def __setitem__(self, word: str, value: int) -> None:
        self.rows[word][self.me] = value

    def add(self, word: str, amount: int) -> None:
        """Add to a word of this worker's row."""
        self.rows[word][self.me] += amount

    def total(self, word: str) -> int:
        """Return a word's sum over all workers: the model's version, of "updates"."""
        return int(self.rows[word].sum())

    def others(self) -> list[int]:
        """Return the places of the other workers whose processes live."""
        places = range(self._memory.places)
        return [p for p in places if p != self.me and self._memory.is_present(p)]

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Write to the model; where another worker does at the same time, that is counted.

        Of elements that both write in the same nanoseconds one addition is lost: the only one that
        ever is. So it is at most the updates counted here that lose anything, and each a part.
        """
        others = self.others()
        begun = self._sum("writes_begun", others)
        beside_others = self._sum("writes_ended", others) < begun
        self.add("writes_begun", 1)
        try:
            yield
        finally:
            self.add("writes_ended", 1)
            if beside_others or self._sum("writes_begun", others) > begun:
                self.add("overlapped", 1)

    def _sum(self, word: str, places: list[int]) -> int:
        return int(self.rows[word][places].sum()) if places else 0


def now_nanoseconds() -> int:
    """Return the clock that busy times are taken from."""
    return time.perf_counter_ns()

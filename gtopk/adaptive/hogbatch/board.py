"""Board: what the workers of a node know of one another, a row for each, in shared memory.

Only its worker writes a row, eight bytes at a time; everybody reads all of them at any time. What
an evaluation adds up is cleared in all rows by whoever prepares its round.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from collectives.transports.node_memory import NodeMemory

from .device_classes import CLASSES

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

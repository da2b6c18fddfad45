"""Probe: the smallest batch that a device computes at nearly its full speed.

In the first batches of the first epoch sizes double, three batches of each, until twice the size
gives less than a quarter more samples a second, in three more, too; other work on the machine makes
batches slower, and none quicker, so that the quickest of them tell:

    samples/s                        ___----
                            __---'''
                        _-'
                     .-'    ^ here
    size       1  2  4  8  16  32  64
"""

from __future__ import annotations

from typing import Final

import torch

GAIN: Final = 1.25
_BATCHES: Final = 3  # of a size
MEMORY_SHARE: Final = 0.8


class Probe:
    """Sizes to be tried, until `found`.

    found: the size that was sought; None while it is.
    """

    def __init__(self, smallest: int, largest: int) -> None:
        self._largest = largest
        self._size = min(smallest, largest)
        self._seconds: list[float] = []
        self._before: float | None = None  # samples a second at half the size
        self.found: int | None = None

    @property
    def size(self) -> int:
        """Return the size to be tried next."""
        return self._size if self.found is None else self.found

    def note(self, size: int, seconds: float) -> None:
        """Take in what a batch took; one of another size tells nothing."""
        if self.found is not None or size != self._size:
            return
        self._seconds.append(seconds)
        if len(self._seconds) < _BATCHES:
            return
        speed = size / max(min(self._seconds), 1e-9)
        pays = self._before is None or speed >= GAIN * self._before
        if not pays and len(self._seconds) < 2 * _BATCHES:
            return
        self._seconds.clear()
        if not pays:
            self.found = size // 2
        elif 2 * size > self._largest:
            self.found = size
        else:
            self._before, self._size = speed, 2 * size

    def limit(self, largest: int) -> None:
        """Try no larger sizes than this."""
        self._largest = min(self._largest, largest)
        self._size = min(self._size, largest)


def memory_of(device: torch.device) -> tuple[int, int]:
    """Return what the last batch took of a GPU's memory at most, and what is free for the next.

    Bytes; what PyTorch's allocator keeps for tensors to come is free, too.
    """
    driver_free, _ = torch.cuda.mem_get_info(device)
    used, kept = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    return torch.cuda.max_memory_allocated(device) - used, driver_free + kept - used


def fits(size: int, took_bytes: int, free_bytes: int) -> int:
    """Return the largest batch that memory has room for, by what one of `size` took of it."""
    if took_bytes <= 0:
        return size * 1024  # too little to be seen
    return max(1, int(MEMORY_SHARE * free_bytes * size / took_bytes))

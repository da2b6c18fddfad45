"""Sizes: how many samples a worker claims next.

Class sizes: the first worker of a device class that has probed sets the class's smallest batch.
A probe is as noisy as its timings. If each worker kept its own result, workers of one class would
differ for the whole run:

    worker   0  probes ... finds 16, announces it      16
             1  probes ......... (would find 64)       16, from its next batch on

Probe: the smallest batch that a device computes at nearly its full speed.

In the first batches of the first epoch sizes double, after three batches of each, until twice the
size gives less than a quarter more samples a second, also in three more batches. The fastest batch
of a size counts, because other work on the machine only makes batches slower:

    samples/s                        ___----
                            __---'''
                        _-'
                     .-'    ^ here
    size       1  2  4  8  16  32  64

Adaptive Hogbatch: a worker that has made fewer updates than all others gets a smaller batch, hence
more updates; one that has made more gets a larger one:

    updates    me < all others      between      me > all others
    batch      / alpha              unchanged    * alpha           within the thresholds
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from collectives.transports.counters import NodeMemory

from .ledger import IS_FAST, NAMES, WorkerTable, require_class


class ClassSizes:
    """One worker's view of the smallest batch that each device class has agreed on."""

    def __init__(self, memory: NodeMemory, table: WorkerTable, device_class: str) -> None:
        self._memory = memory
        # By class; 0: not found yet.
        self._announced: np.ndarray[Any, Any] = table.head["smallest"][0]
        self._is_fast = IS_FAST[device_class]
        self._class_index = NAMES.index(device_class)

    @property
    def found(self) -> int | None:
        """Return the smallest batch of this worker's class; None until a worker has found it."""
        return int(self._announced[self._class_index]) or None

    def agree(self, size: int) -> int:
        """Set the class's smallest batch to `size`, unless another worker was first; return it.

        A slow class's smallest batch is never above a fast one's.
        """
        with self._memory.lock():
            # Another worker may have agreed on a size since this one checked.
            if not self.found:
                self._announced[self._class_index] = self._limited_by_others(size)
            return int(self._announced[self._class_index])

    def _limited_by_others(self, size: int) -> int:
        by_class = zip(IS_FAST.values(), self._announced, strict=True)
        others = [int(least) for fast, least in by_class if least and fast != self._is_fast]
        return max([size, *others]) if self._is_fast else min([size, *others])


GAIN: Final = 1.25
_BATCHES: Final = 3  # of each size
MEMORY_SHARE: Final = 0.8


class Probe:
    """Finds a worker's smallest batch: try batches of `size`, and `note` their seconds.

    found: the result; None until it is known.
    """

    def __init__(self, smallest: int, largest: int) -> None:
        self._largest = largest
        self._size = min(smallest, largest)
        self._seconds: list[float] = []
        self._before: float | None = None  # samples a second at half the size
        self.found: int | None = None

    @property
    def size(self) -> int:
        """Return the size to try next, or the result."""
        return self._size if self.found is None else self.found

    def note(self, size: int, seconds: float) -> None:
        """Record the seconds of a batch; a batch of another size is ignored."""
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
    """Return the peak bytes that the last batch took of a GPU's memory, and the free bytes.

    Memory that PyTorch's allocator keeps for later tensors counts as free.
    """
    driver_free, _ = torch.cuda.mem_get_info(device)
    used, kept = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    return torch.cuda.max_memory_allocated(device) - used, driver_free + kept - used


def largest_fitting(size: int, took_bytes: int, free_bytes: int) -> int:
    """Return the largest batch that fits into memory, if one of `size` took `took_bytes`."""
    if took_bytes <= 0:
        return size * 1024  # too little to measure
    return max(1, int(MEMORY_SHARE * free_bytes * size / took_bytes))


class Thresholds(NamedTuple):
    """The range of a worker's batches: wide => balanced updates; narrow => better utilisation."""

    smallest: int
    largest: int

    def clip(self, size: float) -> int:
        """Return the nearest allowed size."""
        return int(max(self.smallest, min(size, self.largest)))


def next_size(
    size: int, updates: float, others: Sequence[float], alpha: float, thresholds: Thresholds
) -> int:
    """Return the size of a worker's next batch from its updates; see the module's docstring.

    The published code of Ma and Rusu has the counts but not the rule, which is reconstructed here.
    """
    if others and updates < min(others):
        return thresholds.clip(size / alpha)
    if others and updates > max(others):
        return thresholds.clip(size * alpha)
    return thresholds.clip(size)


def thresholds_of(sizes: Mapping[str, int | Sequence[int]] | None) -> dict[str, Thresholds]:
    """Return the given thresholds, by device class: a pair of sizes, or one size for both.

    Raises ValueError for an unknown class, and for thresholds that are not whole numbers, crossed
    or out of range.
    """
    if sizes is not None and not isinstance(sizes, Mapping):
        raise ValueError(
            'sizes must map device classes to sizes, such as {"cpu": (4, 64), "gpu": 256}, got '
            f"{sizes!r}"
        )
    found = {}
    for name, given in (sizes or {}).items():
        require_class(name)
        pair = tuple(given) if isinstance(given, Sequence) else (given, given)
        if len(pair) != 2 or not all(map(is_whole, pair)):
            raise ValueError(
                f"sizes[{name!r}] must be the smallest and the largest batch, or one for both, "
                f"whole numbers, got {given!r}"
            )
        found[name] = checked(Thresholds(*map(int, pair)), f"device class {name!r}")
    return found


def checked(thresholds: Thresholds, owner: str) -> Thresholds:
    """Return the thresholds; raise ValueError if they are crossed or below 1."""
    if thresholds.smallest > thresholds.largest:
        raise ValueError(
            f"the thresholds of {owner} are crossed: the smallest batch must not be above the "
            f"largest, got {thresholds.smallest} and {thresholds.largest}"
        )
    if thresholds.smallest < 1:
        raise ValueError(f"the batches of {owner} must be at least 1, got {thresholds.smallest}")
    return thresholds


def is_whole(value: object) -> bool:
    """Tell whether a value is a whole number; bool does not count."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def default_thresholds(min_batch: int, batch_size: int, max_batch: int | None) -> Thresholds:
    """Return a worker's default thresholds; raise ValueError if they are crossed."""
    largest = min(batch_size, max_batch or batch_size)
    if min_batch > largest:
        bound = f"batch_size={batch_size} of the DataLoader"
        if largest < batch_size:
            bound = f"max_batch={max_batch}"
        raise ValueError(
            f"min_batch={min_batch} is above {bound}: no batch of this rank would be allowed"
        )
    return Thresholds(min_batch, largest)


class Sizer:
    """One worker's sizes; without sizes from the user it follows its class's.

    thresholds: None until they are known; if not given, a probe finds the smallest.
    size: size of its next batch.
    """

    def __init__(
        self,
        is_fast: bool,
        adapts: bool,
        alpha: float,
        given: Thresholds | None,
        default: Thresholds,
        class_sizes: ClassSizes | None = None,
    ) -> None:
        """class_sizes: shared with other workers, if any; given sizes are noted in it, too."""
        self._is_fast, self._adapts, self._alpha = is_fast, adapts, alpha
        self._default, self._class_sizes = default, class_sizes
        self._fitted = 0  # the largest batch that has fitted into memory
        self.probe: Probe | None = None
        self.thresholds: Thresholds | None = None
        if given is not None:
            self._settle(given)
        elif is_fast and not adapts:
            self._settle(Thresholds(default.largest, default.largest))
        else:
            self.probe = Probe(default.smallest, default.largest)
            self.size = self.probe.size

        if self.thresholds is not None:
            self._agree(self.thresholds.smallest)

    def _settle(self, thresholds: Thresholds) -> None:
        self.thresholds = thresholds
        self.size = thresholds.largest if self._is_fast else thresholds.smallest

    def _agree(self, smallest: int) -> int:
        return smallest if self._class_sizes is None else self._class_sizes.agree(smallest)

    def _thresholds_from(self, smallest: int) -> Thresholds:
        return Thresholds(self._default.clip(smallest), self._default.largest)

    def next(self, updates: float, others: Sequence[float]) -> int:
        """Return the size to claim, from this worker's updates and the others'."""
        if self.thresholds is None and self._class_sizes is not None and self._class_sizes.found:
            self._settle(self._thresholds_from(self._class_sizes.found))
        if self.thresholds is None:
            assert self.probe is not None
            self.size = self.probe.size
        elif self._adapts:
            self.size = next_size(self.size, updates, others, self._alpha, self.thresholds)
        return self.size

    def note(self, size: int, seconds: float) -> None:
        """Record the seconds of a batch while the probe runs."""
        if self.thresholds is None and self.probe is not None:
            self.probe.note(size, seconds)
            if self.probe.found is not None:
                self._settle(self._thresholds_from(self._agree(self.probe.found)))

    def resume(self, smallest: int, size: int) -> None:
        """Resume from the smallest batch and the current size of a worker of the same class.

        Nothing changes if sizes are given, or need no probe.
        """
        if self.probe is not None:
            self.thresholds = self._thresholds_from(self._agree(smallest))
            self.size = self.thresholds.clip(size)

    def note_memory(self, size: int, took_bytes: int, free_bytes: int) -> None:
        """Limit sizes to what fits into memory, estimated from the bytes that a batch took.

        free_bytes: free for the next batch. A batch below the current size, such as an epoch's
        last, is ignored, and a size that has fitted before stays allowed.
        """
        if size < self.size:
            return
        self._fitted = max(self._fitted, size)
        self.limit(max(self._fitted, largest_fitting(size, took_bytes, free_bytes)))

    def limit(self, largest: int) -> None:
        """Limit sizes to `largest` from now on, because more does not fit into memory."""
        low, high = self._default
        self._default = Thresholds(min(low, largest), min(high, largest))
        if self.probe is not None:
            self.probe.limit(largest)
        if self.thresholds is not None:
            low, high = self.thresholds
            self.thresholds = Thresholds(min(low, largest), min(high, largest))
            self.size = min(self.size, largest)

"""Calls of C functions: arrays as their arguments, and the number of threads of a loop.

A loop takes this rank's share of the cores, and one core under oversubscription. The launchers'
variables tell how many ranks share this machine.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import numpy as np

from ... import environment
from ...cores import usable_cores
from ...vector import Array
from .library import library

POINTER: Final = ctypes.c_void_p
COUNT: Final = ctypes.c_int64


# The suffixes of C names, by dtype. Dtypes of foreign byte order are missing.
_SUFFIXES: Final = {
    np.dtype(np.float16): "f16",
    np.dtype(np.uint16): "bf16",
    np.dtype(np.float32): "f32",
    np.dtype(np.float64): "f64",
    np.dtype(np.int32): "i32",
    np.dtype(np.int64): "i64",
}


class _ByDtype(dict[object, Callable[..., int]]):
    """One C function, by the dtype of its arrays, or by that of its values and of its indices."""

    def __missing__(self, key: object) -> Callable[..., int]:
        dtypes = " at ".join(map(str, key if isinstance(key, tuple) else [key]))
        raise ValueError(
            f"the C++ core has nothing for {dtypes}: convert values with .astype(np.float32), "
            "indices with .astype(np.int32)"
        )


_byte: Final[Callable[[Any], ctypes.c_char]] = ctypes.c_char.from_buffer
_address: Final = ctypes.addressof


def address(array: Array) -> int:
    """Return where the data of a contiguous array begins; the caller keeps the array alive."""
    try:
        return _address(_byte(array))  # a third of the time that array.ctypes.data takes
    except (TypeError, ValueError):  # read-only, or empty
        return array.ctypes.data


def packed(array: Array) -> Array:
    """Return the array, or a copy where its elements lie apart or off their alignment."""
    flags = array.flags
    if flags.c_contiguous and flags.aligned:
        return array
    return np.array(array, order="C")


def function(name: str, *arguments: Any) -> _ByDtype:
    """Return the C function `name`, for every dtype, or pair of them, that it exists for."""
    keys: dict[object, str] = {
        (values, indices): f"{_SUFFIXES[values]}_{_SUFFIXES[indices]}"
        for values, indices in itertools.product(_SUFFIXES, repeat=2)
    }
    loaded, found = library(), _ByDtype()
    for key, suffix in (_SUFFIXES | keys).items():
        # No function exists for every dtype; one that is missing is reported where it is called.
        entry = getattr(loaded, f"{name}_{suffix}", None)
        if entry is not None:
            entry.argtypes, entry.restype = arguments, COUNT
            found[key] = entry
    return found


def enough_memory(result: int) -> int:
    """Return the result of a C function that allocates; raise MemoryError where it failed."""
    if result < 0:
        raise MemoryError("the C++ core ran out of memory")
    return result


# Open MPI, MPICH and Intel MPI, MVAPICH, torchrun, Horovod.
_COUNTS: Final = (
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "LOCAL_WORLD_SIZE",
    "HOROVOD_LOCAL_SIZE",
)


def local_ranks() -> int:
    """Return how many ranks run here; 1 where no variable tells."""
    said = [os.environ.get(name, "") for name in _COUNTS]
    if in_slurm_step():
        said += [_tasks_here(), os.environ.get("SLURM_NTASKS_PER_NODE", "")]
    return max([1, *(int(text) for text in said if text.isdecimal())])


def in_slurm_step() -> bool:
    """Tell whether srun started this process: a batch script has most of the variables, too."""
    return "SLURM_STEP_ID" in os.environ


def _tasks_here() -> str:
    """Return SLURM's tasks on this node: with "8(x2),4" nodes 0 and 1 have 8, node 2 has 4."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    tasks = itertools.chain.from_iterable([count] * int(times or 1) for count, times in found)
    node = os.environ.get("SLURM_NODEID", "0")
    return next(itertools.islice(tasks, int(node) if node.isdecimal() else 0, None), "")


# A few cores use the whole memory bandwidth; more threads would only slow autograd.
_MOST: Final = 8
_MOST_ASKED: Final = 1 << 10  # C would cut a larger number to 32 bits

# Of a thread: a rank's other threads keep their own number.
_forced: ContextVar[int | None] = ContextVar("threads", default=None)


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Run the loops that this thread calls in the context on `count` threads."""
    token = _forced.set(count)
    try:
        yield
    finally:
        _forced.reset(token)


def threads() -> int:
    """Return how many threads a loop may use now."""
    return _forced.get() or default_threads()


@functools.cache
def default_threads() -> int:
    """Return GTOPK_THREADS, up to 1024, or this rank's share of the cores that it may use; >= 1.

    May use: by the affinity, and by the quota of its container. SLURM says what a task's share is
    where one asked for that (--cpus-per-task).

    Raises ValueError for a GTOPK_THREADS that is no positive number.
    """
    if asked := environment.threads():
        return min(asked, _MOST_ASKED)
    granted = os.environ.get("SLURM_CPUS_PER_TASK", "") if in_slurm_step() else ""
    share = int(granted) if granted.isdecimal() else usable_cores() // local_ranks()
    # SLURM's share may be more than the affinity, or the container, allows.
    return max(1, min(_MOST, share, usable_cores()))

"""Handles: the operations in flight, by a number that stands for each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final

from ...runtime.coordinator import Operation, Work
from ...runtime.coordinator.fusion import Dense
from ...runtime.world.process_sets import ProcessSet

_handles: Final[dict[int, tuple[Operation, Callable[[Any], Any]]]] = {}
_next_handle: Final = itertools.count(1)  # a handle is never false


def submit(
    kind: str,
    name: str | None,
    process_set: ProcessSet,
    signature: Sequence[str],
    work: Work,
    finish: Callable[[Any], Any],
    *,
    flags: int = 0,
    fusion: Sequence[Dense] = (),
) -> int:
    """Queue an operation of a process set's ranks, and return its handle.

    finish: makes the output of what `work` returns, in the thread that synchronizes.
    Raises ValueError on a rank outside the set, and while an operation of this name is in flight.
    """
    members = process_set.members
    full_name = f"{kind}.{name or f'noname.{next(members.unnamed)}'}"
    operation = process_set.engine.submit(full_name, signature, work, flags, fusion=fusion)
    handle = next(_next_handle)
    _handles[handle] = operation, finish
    return handle


def synchronize(handle: int) -> Any:
    """Wait for an asynchronous operation and return its output; None for an unknown handle.

    The output of a group is a tuple, that of alltoall the pair of its rows and their numbers.
    Raises HorovodInternalError when the ranks disagreed or one is gone.
    """
    if handle not in _handles:
        return None
    operation, finish = _handles.pop(handle)
    return finish(operation.wait())


def poll(handle: int) -> bool:
    """Tell whether `synchronize` would return at once.

    Raises ValueError for an unknown handle: one that was synchronized is.
    """
    if handle not in _handles:
        raise ValueError(f"Handle {handle} was not created or has been cleared.")
    return _handles[handle][0].done


def forget_all() -> None:
    """Forget the handles of an earlier world."""
    _handles.clear()

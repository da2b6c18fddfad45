"""Barrier: an operation without a tensor."""

from __future__ import annotations

from ...process_sets import ProcessSet, global_process_set


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank of the set has called it; what is in flight stays so."""
    name = f"barrier.noname.{next(process_set.members.unnamed)}"
    # Agreeing on the operation is the barrier.
    process_set.engine.submit(name, [], lambda transport, votes: None).wait()

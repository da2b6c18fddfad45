"""Barrier and join: operations without tensors."""

from __future__ import annotations

import itertools

from ...step.join_shadow import break_off_steps
from ...world.process_sets import ProcessSet, global_process_set


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank of the set has called it; what is in flight stays so."""
    name = f"barrier.noname.{next(process_set.members.unnamed)}"
    # Agreeing on the operation is the barrier.
    process_set.engine.submit(name, [], lambda transport, all_flags: None).wait()


def join(device: int = -1) -> int:
    """Say that this rank has no more data, and return the rank that said so last.

    Until all have, this one contributes zeros to the others' allreduces; averages are still over
    all ranks. Other operations are an error while a rank has joined. A step that has come as far as
    `backward()` here is broken off: the others take it without this rank's gradients, and its
    residual is what it was before.

    device: accepted for Horovod's scripts, not needed.
    """
    everyone = global_process_set.members
    engine = global_process_set.engine
    break_off_steps(engine)
    last: int = engine.join().wait()
    # Who joined early has counted fewer operations without a name than the others.
    count = next(everyone.unnamed)
    counts = engine.submit(
        "join.unnamed", [], lambda transport, all_flags: all_flags, flags=count
    ).wait()
    everyone.unnamed = itertools.count(max(counts))
    return last

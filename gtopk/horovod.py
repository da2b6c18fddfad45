"""gTop-k for a script that keeps Horovod: its ranks, its communicator, one optimizer of ours.

    import horovod.torch as hvd
    import gtopk.horovod

    hvd.init()
    optimizer = gtopk.horovod.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=gtopk.horovod.Compression.gtopk(density=0.01),
    )

    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    gtopk.horovod.broadcast_optimizer_state(optimizer, root_rank=0)

Horovod's own alltoall carries the messages. `hvd.shutdown()` ends both, and so does the program's
end; before another `hvd.init()`, call `shutdown` here, too. Horovod's `broadcast_optimizer_state`
is for the optimizer before it is wrapped: it steps one that has no state yet, on that rank alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from .compression import Compression
from .optim import distributed as optimizer
from .runtime.world import world
from .runtime.world.joining import join_over
from .torch import functions

__all__ = ["Compression", "DistributedOptimizer", "broadcast_optimizer_state", "shutdown"]

P = ParamSpec("P")
T = TypeVar("T")

shutdown = world.shutdown


def _on_horovod(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function find gtopk's world on Horovod's ranks, opened where it is not yet."""

    @functools.wraps(function)
    def with_a_world(*args: P.args, **kwargs: P.kwargs) -> T:
        if not world.is_initialized():
            # Ranks may still be leaving the world before: another begins when all have left it.
            world.finish_leaving()
            world.init_on(join_over("horovod"))
        return function(*args, **kwargs)

    return with_a_world


DistributedOptimizer = _on_horovod(optimizer.DistributedOptimizer)
broadcast_optimizer_state = _on_horovod(functions.broadcast_optimizer_state)

"""gTop-k for a script that stays on Horovod: only the optimizer comes from gtopk.

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

Horovod's alltoall carries the messages. `hvd.shutdown()` and the end of the program shut down
gtopk, too; before another `hvd.init()`, also call this module's `shutdown`. Use Horovod's own
`broadcast_optimizer_state` only before wrapping the optimizer: to create missing state it calls
`step`, on one rank alone.
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
    """Wrap a function so that it first opens gtopk's world on Horovod's ranks, if none is open."""

    @functools.wraps(function)
    def with_a_world(*args: P.args, **kwargs: P.kwargs) -> T:
        if not world.is_initialized():
            # Ranks may still be leaving the previous world: a new one can only begin after that.
            world.finish_leaving()
            world.init_on(join_over("horovod"))
        return function(*args, **kwargs)

    return with_a_world


DistributedOptimizer = _on_horovod(optimizer.DistributedOptimizer)
broadcast_optimizer_state = _on_horovod(functions.broadcast_optimizer_state)

"""gTop-k for a script that keeps Horovod: its ranks, its communicator, one optimizer of ours.

    import horovod.torch as hvd
    import gtopk.horovod

    hvd.init()
    optimizer = gtopk.horovod.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=gtopk.horovod.Compression.gtopk(density=0.01),
    )

Horovod's own alltoall carries the messages. `hvd.shutdown()` ends both; so does the program's end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from . import optimizer, world
from .compression import Compression
from .joining import join_over

__all__ = ["Compression", "DistributedOptimizer", "shutdown"]

P = ParamSpec("P")
T = TypeVar("T")

shutdown = world.shutdown


def _on_horovod(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function find gtopk's world on Horovod's ranks, opened where it is not yet."""

    @functools.wraps(function)
    def with_a_world(*args: P.args, **kwargs: P.kwargs) -> T:
        _open_world()
        return function(*args, **kwargs)

    return with_a_world


def _open_world() -> None:
    if not world.is_initialized():
        world.init_on(join_over("horovod"))


DistributedOptimizer = _on_horovod(optimizer.DistributedOptimizer)

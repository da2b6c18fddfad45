"""Fusion: small dense arrays that are ready at the same time are reduced as one.

    engine.submit(name, facts, work, fusion=[Dense(array)])

An operation that is submitted with dense arrays has them reduced by the engine, in their own
memory, before `work` is called: alone, or copied into one buffer with arrays of other operations
that became ready in the same cycle and have the same key. `work(transport, votes)` is what is left
to do (an integer's division, say); its result is the operation's. Several arrays in one operation
are a group: all are reduced, or none.

No rank needs a recipe for such an operation: one that has joined takes part with the neutral
element (zeros in a sum). The engine checks dtype, length, reduction and factors across ranks, after
the operation's own facts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from collectives.transports import Transport


class Dense(NamedTuple):
    """An array that is reduced over the ranks in place.

    array:     on the host, one-dimensional, contiguous, writable; nobody else may touch it until
               the operation is done.
    reduction: "sum", "product", "min" or "max".
    prescale:  factor before the reduction, postscale: after it. Integers are scaled in float64 and
               truncated, float16 in float32.
    """

    array: NDArray[Any]
    reduction: str = "sum"
    prescale: float = 1.0
    postscale: float = 1.0


def scale(array: NDArray[Any], factor: float) -> None:
    """Multiply in place; integers in float64, truncated; float16 in float32."""
    if factor == 1.0:
        return
    if array.dtype.kind != "f":
        array[...] = np.trunc(array * np.float64(factor))
    elif array.dtype == np.float16:
        array[...] = array.astype(np.float32) * np.float32(factor)
    else:
        array *= array.dtype.type(factor)


def reduce_alone(dense: Dense, transport: Transport) -> None:
    """Reduce an array over the ranks in its own memory."""
    scale(dense.array, dense.prescale)
    transport.allreduce(dense.array, dense.reduction)
    scale(dense.array, dense.postscale)

"""gtopk-tree: merge up a binomial tree to rank 0, and broadcast the result down it.

Shi et al. 2019, algorithm 3. Kept for comparison: it takes twice the rounds of `gtopk`.

    P = 6     round 0       round 1       round 2       then down, in reverse
              1 -> 0        2 -> 0        4 -> 0        0 -> 4
              3 -> 2                                    0 -> 2
              5 -> 4                                    4 -> 5, 2 -> 3, 0 -> 1

The paper clears a pick from the residual if its index is in the final result. That loses a pick
that was dropped on the way up but whose index came back through another branch. Here each message
down also has one bit for each entry of the list that came up that edge: is it still alive?
put_back="published" does what the paper does, for comparison.
"""

from __future__ import annotations

from .. import wire
from ..errors import NonFiniteError
from ..kernels import contains, merge
from ..transports.transport import Transport
from ..vector import SparseVector
from ..wire import EXACT, NOBODY, Format
from .conservation import (
    ReductionResult,
    alive_bytes,
    check_finite,
    intersect,
    lowest_refusing,
    pack_alive,
    rounding_error,
    split_result,
    unpack_alive,
)

PUT_BACK = ("owners", "published")


def reduce(
    selected: SparseVector,
    k: int,
    transport: Transport,
    *,
    format: Format = EXACT,
    put_back: str = "owners",
) -> tuple[SparseVector, SparseVector]:
    """Reduce to rank 0 and broadcast; a rank's picks that were dropped on the way return to it.

    The rounding errors of a list on its way up return to the rank that sent it.

    put_back: "owners" returns every dropped pick; "published", which breaks conservation, only
              those whose index is not in the result.
    """
    if put_back not in PUT_BACK:
        raise ValueError(f"put_back must be one of {', '.join(PUT_BACK)}; got {put_back!r}")
    rank, size, ranks = transport.rank, transport.size, transport.ranks
    number = transport.begun
    # The result is sent down exact: rounding again would give a different update.
    exact = Format(format.indices)
    merged, refused_by = check_finite(selected, ranks[rank])
    inputs: list[tuple[int, SparseVector, SparseVector]] = []  # child, its list, ours before
    distance = 1
    while distance < size and not rank & distance:
        if rank + distance < size:
            child = rank + distance
            child_list, _, child_refused_by = wire.receive(child, selected, k, transport, format)
            inputs.append((child, child_list, merged))
            merged = merge(merged, child_list, k)
            refused_by = lowest_refusing(refused_by, child_refused_by)
            merged, refused_by = check_finite(merged, ranks[rank], refused_by)
        distance *= 2

    error = merged.take(slice(0))
    if rank == 0:
        update = survivors = merge(merged, error, k)  # drops zeros, also for a single rank
    else:
        parent = rank - distance
        encoded = wire.encode(merged, k, format, refused_by=refused_by, number=number)
        transport.send(encoded.message, parent)()
        error = rounding_error(merged, encoded.vector, format)
        update, bits, refused_by = wire.receive(
            parent, selected, k, transport, exact, alive_bytes(merged.entries)
        )
        survivors = merged.where(unpack_alive(bits, merged.entries))
        error = intersect(error, survivors)

    # Undo the merges, the last one first: of each, tell the child which entries are alive.
    for child, child_list, own_list in reversed(inputs):
        bits = pack_alive(contains(survivors.indices, child_list.indices))
        result = wire.encode(update, k, exact, extra=bits, refused_by=refused_by, number=number)
        transport.send(result.message, child)()
        survivors = intersect(own_list, survivors)
    # Raise only now: the messages just sent tell the ranks below of the refusal.
    if refused_by != NOBODY:
        raise NonFiniteError(refused_by)
    cleared = update if put_back == "published" else survivors
    dropped = selected.where(~contains(cleared.indices, selected.indices))
    return split_result(ReductionResult(update, dropped, error))

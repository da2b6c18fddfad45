"""gtopk: the global top-k by recursive doubling; every pair swaps and merges the same two lists.

    P = 4     round 0     round 1          P = 6: ranks 4 and 5 hand their picks to 0 and 1 first,
              0 <-> 1     0 <-> 2          and get the result back last
              2 <-> 3     1 <-> 3

log2(P) rounds of one message, where the paper's tree takes 2 log2(P) (Shi et al. 2019, section
III, give this cost; their code does not reach it).

Conservation costs no bytes: a rank takes part in every merge of its own subtree, so it knows of
each of its picks whether it is still alive: `alive &= index in merged`. A pick that died returns
to its owner's residual, even where another branch brought its index back into the result.
"""

from __future__ import annotations

from .. import wire
from ..kernels import contains, merge
from ..transports.transport import Transport
from ..vector import SparseVector
from .alive import alive_bytes, pack_alive, unpack_alive


def reduce(
    selected: SparseVector, k: int, transport: Transport
) -> tuple[SparseVector, SparseVector]:
    """Agree on the k largest of the pairwise merged sums; dead picks return to their owners."""
    rank, size = transport.rank, transport.size
    paired = 1 << (size.bit_length() - 1)  # ranks beyond the largest power of two are folded in

    if rank >= paired:
        host = rank - paired
        transport.send(wire.encode(selected, k).message, host)()
        message = transport.receive(host)
        bits = alive_bytes(selected.entries)
        result = wire.decode(message, selected, k, host, extra_bytes=bits)
        return result.vector, selected.where(~unpack_alive(result.extra, selected.entries))

    merged = selected
    guest = rank + paired
    if guest < size:
        guests = wire.decode(transport.receive(guest), selected, k, guest).vector
        merged, _ = merge(merged, guests, k)
        guests_alive = contains(merged.indices, guests.indices)
    alive = contains(merged.indices, selected.indices)

    distance = 1
    while distance < paired:
        peer = rank ^ distance
        message = transport.exchange(wire.encode(merged, k).message, peer)
        theirs = wire.decode(message, selected, k, peer).vector
        merged, _ = merge(merged, theirs, k)
        alive &= contains(merged.indices, selected.indices)
        if guest < size:
            guests_alive &= contains(merged.indices, guests.indices)
        distance *= 2

    if guest < size:
        message = wire.encode(merged, k, extra=pack_alive(guests_alive)).message
        transport.send(message, guest)()
    return merged, selected.where(~alive)

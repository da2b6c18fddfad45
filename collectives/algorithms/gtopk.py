"""gtopk: the global top-k by recursive doubling; both ranks of a pair merge the same two lists.

    P = 4     round 0     round 1          P = 6: ranks 4 and 5 (guests) first send their picks to
              0 <-> 1     0 <-> 2          0 and 1, and get the result back last. Ranks 2 and 3,
              2 <-> 3     1 <-> 3          ready early, wait for a go-ahead (`wait_for_go_ahead`)

log2(P) rounds of one message, where the paper's tree takes 2 log2(P) (Shi et al. 2019, section
III, give this cost; their code does not reach it).

Conservation costs no bytes: a rank takes part in every merge that its picks go through, so it knows
which of them are still alive: `alive &= index in merged`. A pick that died returns to its owner's
residual, even if another branch brings its index back into the result.
"""

from __future__ import annotations

import sys
from numbers import Real
from typing import Final

import numpy as np

from .. import wire
from ..errors import MessageError
from ..kernels import merge
from ..transports.transport import Transport
from ..vector import SparseVector
from ..wire import EXACT, NOBODY, Format
from .conservation import (
    Conservation,
    ReductionResult,
    alive_bytes,
    check_finite,
    lowest_refusing,
    pack_alive,
    split_result,
    unpack_alive,
)

# The default of Compression.gtopk. On a power of two ranks it sends no more bytes than growth 1.
USUAL_GROWTH: Final = 2.0


def check_growth(growth: float) -> None:
    """Raise ValueError unless lists can grow by this factor."""
    if not isinstance(growth, Real) or not 1.0 <= growth <= sys.float_info.max:
        raise ValueError(f"growth must be a number from 1 on, got {growth!r}")


def kept_sizes(k: int, growth: float, rounds: int, length: int) -> list[int]:
    """Return how many entries the merge of each round keeps; the same on every rank.

    The paper keeps k in every round, so that k of up to P k picks survive. The last rounds may keep
    more: growth * k in the last one, half as many in each round before it, and never under k:

        growth = 4, 5 rounds     k     k     k    2k    4k     kept, and sent in the next round

    A merge of two lists at most doubles them, so the rounds that double drop nothing. The last
    round's list is not sent, so an update of 4k entries costs 6 k sent entries a rank where one of
    k costs 5 k; in general less than (log2 P + growth) k.
    """
    # Limited before it is rounded, as the product may be infinite.
    sizes = (min(growth * k / 2 ** (rounds - 1 - number), length) for number in range(rounds))
    return [min(max(k, round(size)), length) for size in sizes]


def reduce(
    selected: SparseVector,
    k: int,
    transport: Transport,
    *,
    format: Format = EXACT,
    growth: float = 1.0,
) -> tuple[SparseVector, SparseVector]:
    """Agree on the k largest of the pairwise merged sums.

    growth: the last rounds keep up to growth * k entries: a larger update, in which fewer picks are
            dropped, for more bytes; 2 costs none on a power of two ranks (Compression.gtopk).
    """
    check_growth(growth)
    return split_result(reduce_list(selected, k, transport, format, growth))


def reduce_list(
    selected: SparseVector,
    k: int,
    transport: Transport,
    format: Format,
    growth: float,
    refused_by: int = NOBODY,
) -> ReductionResult:
    """Return this rank's result; refused_by: a rank that has refused already, or NOBODY."""
    size = transport.size
    paired = 1 << (size.bit_length() - 1)  # ranks beyond the largest power of two are folded in
    kept = kept_sizes(k, growth, paired.bit_length() - 1, selected.length)
    picks, refused_by = check_finite(selected, transport.ranks[transport.rank], refused_by)
    if transport.rank >= paired:
        return _reduce_as_folded_rank(picks, refused_by, k, kept[-1], transport, format)
    return _reduce_with_folded_rank(picks, refused_by, k, kept, transport, format)


def _reduce_with_folded_rank(
    picks: SparseVector,
    refused_by: int,
    k: int,
    kept: list[int],
    transport: Transport,
    format: Format,
) -> ReductionResult:
    rank = transport.rank
    paired = 1 << len(kept)
    guest = rank + paired
    folds = guest < transport.size
    conservations = [Conservation(picks)]
    if folds:
        guest_picks, _, guest_refused_by = wire.receive(guest, picks, k, transport, format)
        refused_by = lowest_refusing(refused_by, guest_refused_by)
        # Tracks only which are alive: the guest itself returns the rounding errors of its picks.
        conservations.append(Conservation(guest_picks))
    merged = picks
    if folds or not kept:  # this merge also drops zeros; without it, that of the first round does
        merged = merge(picks, guest_picks if folds else picks.take(slice(0)), k)
        merged, refused_by = check_finite(merged, transport.ranks[rank], refused_by)
        for conservation in conservations:
            conservation.note_merge(merged)

    holders = 1
    for keep in kept:
        peer = rank ^ holders
        wait_for_go_ahead(transport, peer, holders, transport.size - paired, k)
        sent = merged
        merged, rounded, refused_by = exchange_and_merge(
            sent, refused_by, keep, transport, peer, format
        )
        # Before `note_merge`, which discards the errors of dropped entries: those return whole.
        conservations[0].note_rounding(sent, rounded, format, rank % holders, holders)
        holders *= 2
        named_rank = transport.ranks[rank & -holders]  # the same on all ranks that hold this list
        # Check each merge: finite values may add up to infinity.
        merged, refused_by = check_finite(merged, named_rank, refused_by)
        for conservation in conservations:
            conservation.note_merge(merged)

    if folds:
        bits = pack_alive(conservations[1].alive)
        # Exact values: rounding again would give the guest another update than the others'.
        exact = Format(format.indices)
        number = transport.begun
        result = wire.encode(
            merged, kept[-1], exact, extra=bits, refused_by=refused_by, number=number
        )
        transport.send(result.message, guest)()
    return conservations[0].close(merged, refused_by)


def exchange_and_merge(
    own: SparseVector,
    refused_by: int,
    keep: int,
    transport: Transport,
    peer: int,
    format: Format,
) -> tuple[SparseVector, SparseVector, int]:
    """Swap lists with a peer, and return the `keep` largest entries of the sum of both.

    Also returned: `own` with the rounded values that the peer received, and the refusing rank.
    """
    number = transport.begun
    encoded = wire.encode(own, keep, format, refused_by=refused_by, number=number)
    message, sender = transport.exchange(encoded.message, peer), transport.ranks[peer]
    received, _, peer_refused_by = wire.decode(message, own, keep, sender, format, number=number)
    # The rounded list, not `own`: both ranks must merge the same two lists.
    merged = merge(encoded.vector, received, keep)
    return merged, encoded.vector, lowest_refusing(refused_by, peer_refused_by)


def _reduce_as_folded_rank(
    picks: SparseVector,
    refused_by: int,
    k: int,
    result_k: int,
    transport: Transport,
    format: Format,
) -> ReductionResult:
    host = transport.rank - (1 << (transport.size.bit_length() - 1))
    conservation = Conservation(picks)
    encoded = wire.encode(picks, k, format, refused_by=refused_by, number=transport.begun)
    conservation.note_rounding(picks, encoded.vector, format)
    transport.send(encoded.message, host)()
    exact = Format(format.indices)
    update, bits, refused_by = wire.receive(
        host, picks, result_k, transport, exact, alive_bytes(picks.entries)
    )
    # After `note_rounding`: this discards the errors of dropped picks, which return whole.
    conservation.note_alive(unpack_alive(bits, picks.entries))
    return conservation.close(update, refused_by)


# Shorter lists need no go-ahead, which would take longer than sending them.
LONG_ENTRIES: Final = 1024


def wait_for_go_ahead(transport: Transport, peer: int, holders: int, guests: int, k: int) -> None:
    """Pacing: before a swap, a late rank sends its early partner an empty message, the go-ahead.

    So two long lists never share one inbound link. For example, of 3 ranks, rank 2 sends its picks
    to 0, which then swaps with 1. Rank 1 could send at once; but then both lists would share the
    link into rank 0, and the first would arrive no earlier than the second:

        at once     to rank 0      | 2 1 2 1 2 1 2 1 |
                    from rank 0    |                 | 1 1 1 1 2 2 2 2 |

        paced       to rank 0      | 2 2 2 2 | 1 1 1 1 |
                    from rank 0    |         | 1 1 1 1 | 2 2 2 2 |

    Ranks 0 .. guests-1 are late, as each first waits for its guest's picks. A whole block of ranks
    that hold the same list is late if one of them was. Go-aheads are sent only between a late and
    an early block. With them a reduction takes no longer than its rounds; without, up to 1.6 times
    as long (11 ranks).

    holders: ranks in a block. Raises MessageError if a list comes instead of the go-ahead.
    """
    # By k, which all ranks know: no rank knows the length of its peer's list.
    if k < LONG_ENTRIES:
        return
    late, peer_is_late = (rank & -holders < guests for rank in (transport.rank, peer))
    if late and not peer_is_late:
        transport.send(np.empty(0, np.uint8), peer)()
    if peer_is_late and not late:
        go_ahead = transport.receive(peer)
        if go_ahead.size:
            raise MessageError(
                f"the message from rank {transport.ranks[peer]} has {go_ahead.size} bytes where "
                f"rank {transport.ranks[transport.rank]} expects an empty go-ahead; every rank "
                "must use the same k"
            )


def go_aheads(holders: int, guests: int, k: int) -> int:
    """Return how many go-aheads are sent before the swaps of blocks of `holders` ranks."""
    # The late blocks are the first ones, and neighbours pair up: if their number is odd, the last
    # of them swaps with an early block.
    late_blocks = -(-guests // holders)
    return holders if k >= LONG_ENTRIES and late_blocks % 2 else 0

"""gtopk: the global top-k by recursive doubling; every pair swaps and merges the same two lists.

    P = 4     round 0     round 1          P = 6: ranks 4 and 5 hand their picks to 0 and 1 first,
              0 <-> 1     0 <-> 2          and get the result back last; 2 and 3, who are ahead of
              2 <-> 3     1 <-> 3          them, wait for a go-ahead first (`wait_for_go_ahead`)

log2(P) rounds of one message, where the paper's tree takes 2 log2(P) (Shi et al. 2019, section
III, give this cost; their code does not reach it).

Conservation costs no bytes: a rank takes part in every merge of its own subtree, so it knows of
each of its picks whether it is still alive: `alive &= index in merged`. A pick that died returns
to its owner's residual, even where another branch brought its index back into the result.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from .. import wire
from ..errors import MessageError
from ..kernels import merge
from ..transports.transport import Transport
from ..vector import Array, SparseVector
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

# The default of Compression.gtopk: on a power of two ranks it sends no more bytes than 1 does.
USUAL_GROWTH: Final = 2.0


def check_growth(growth: float) -> None:
    """Raise ValueError unless lists can grow by this factor."""
    if not 1.0 <= growth < math.inf:
        raise ValueError(f"growth must be a number from 1 on, got {growth!r}")


def kept_sizes(k: int, growth: float, rounds: int, length: int) -> list[int]:
    """Return how many entries the merge of each round keeps; the same on every rank.

    The paper keeps k in every round, so that k of up to P k picks survive. The last rounds may keep
    more, up to growth * k in the very last, and half as many in each round before, never under k:

        growth = 4, 5 rounds     k     k     k    2k    4k     kept, and so sent in the next round

    Doubling is as fast as a list can grow: the rounds that double drop nothing. What the last round
    keeps is not sent any more, so these updates of 4k entries cost 6 k entries a rank where updates
    of k cost 5 k; in general less than (log2 P + growth) k.
    """
    sizes = (round(growth * k / 2 ** (rounds - 1 - number)) for number in range(rounds))
    return [min(max(k, size), length) for size in sizes]


def reduce(
    selected: SparseVector,
    k: int,
    transport: Transport,
    *,
    format: Format = EXACT,
    growth: float = 1.0,
) -> tuple[SparseVector, SparseVector]:
    """Agree on the k largest of the pairwise merged sums.

    growth: the last rounds keep more, up to growth * k entries.
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
    """Return the outcome; refused_by: a rank that refused before; the list then counts as empty."""
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
        message = transport.receive(guest)
        guests, their_refusal = _read(message, picks, k, transport, guest, format)
        refused_by = lowest_refusing(refused_by, their_refusal)
        # Only its `alive` is used: the guest itself puts back the errors of its picks.
        conservations.append(Conservation(guests))
    merged = picks
    if folds or not kept:  # otherwise the first merge of a round drops zeros
        merged = merge(picks, guests if folds else picks.take(slice(0)), k)
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
        # Before `note_merge`: of an entry that this merge drops, whole picks return, and the error
        # must not return beside them.
        conservations[0].note_rounding(sent, rounded, format, rank % holders, holders)
        holders *= 2
        finder = transport.ranks[rank & -holders]  # the same on all ranks that hold this list
        # Again after each merge: finite values may add up to infinity.
        merged, refused_by = check_finite(merged, finder, refused_by)
        for conservation in conservations:
            conservation.note_merge(merged)

    if folds:
        bits = pack_alive(conservations[1].alive)
        # Values exact: rounded once more, the guest's update would be another than its host's.
        exact = Format(format.indices)
        number = transport.begun
        result = wire.encode(
            merged, kept[-1], exact, extra=bits, refused_by=refused_by, number=number
        )
        transport.send(result.message, guest)()
    return conservations[0].close(merged, refused_by)


def exchange_and_merge(
    mine: SparseVector,
    refused_by: int,
    keep: int,
    transport: Transport,
    peer: int,
    format: Format,
) -> tuple[SparseVector, SparseVector, int]:
    """Swap lists with a peer, and return the `keep` largest entries of the sum of both.

    Beside them `mine` as the peer has received it, rounded, and the rank that refused.
    """
    encoded = wire.encode(mine, keep, format, refused_by=refused_by, number=transport.begun)
    received = transport.exchange(encoded.message, peer)
    theirs, their_refusal = _read(received, mine, keep, transport, peer, format)
    # The rounded list, not `mine`: the peer merges what it has received.
    merged = merge(encoded.vector, theirs, keep)
    return merged, encoded.vector, lowest_refusing(refused_by, their_refusal)


def _read(
    message: Array,
    like: SparseVector,
    k: int,
    transport: Transport,
    peer: int,
    format: Format,
) -> tuple[SparseVector, int]:
    """Return the list that a peer has sent, and the rank that refused, or NOBODY."""
    sender = transport.ranks[peer]
    decoded = wire.decode(message, like, k, sender, format, number=transport.begun)
    return decoded.vector, decoded.refused_by


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
    update, bits, refused_by = wire.decode(
        transport.receive(host),
        picks,
        result_k,
        transport.ranks[host],
        Format(format.indices),
        alive_bytes(picks.entries),
        number=transport.begun,
    )
    # After `note_rounding`: it strikes off the errors of picks that died, which return whole.
    conservation.note_alive(unpack_alive(bits, picks.entries))
    return conservation.close(update, refused_by)


# A shorter list is sent at once: it takes no longer than a go-ahead, one latency.
LONG_ENTRIES: Final = 1024


def wait_for_go_ahead(transport: Transport, peer: int, holders: int, guests: int, k: int) -> None:
    """Send or await the go-ahead before a swap, where one of the two blocks is late.

    So two long lists never share one inbound link.

    With 3 ranks, 2 hands its picks to 0, which then swaps with 1. Rank 1 has nothing to wait for;
    but if it sent at once, both lists would share the way to rank 0, and arrive when it has both:

        at once     to rank 0      | 2 1 2 1 2 1 2 1 |
                    from rank 0    |                 | 1 1 1 1 2 2 2 2 |

        in turn     to rank 0      | 2 2 2 2 | 1 1 1 1 |
                    from rank 0    |         | 1 1 1 1 | 2 2 2 2 |

    Ranks 0 .. guests-1 each have a guest, whose picks they wait for first. So a block of ranks that
    holds one list is late where a guest is in it, and ahead where none is; only such a pair of
    blocks needs a go-ahead. Every rank thus reduces in the time of the rounds alone, where it took
    up to 1.6 times as long (11 ranks).

    holders: ranks in a block. Raises MessageError where a list comes instead of the go-ahead.
    """
    # By k, which all ranks know: no rank knows how many entries its peer's list has.
    if k < LONG_ENTRIES:
        return
    late, peer_is_late = (rank & -holders < guests for rank in (transport.rank, peer))
    if late and not peer_is_late:
        transport.send(np.empty(0, np.uint8), peer)()
    if peer_is_late and not late:
        word = transport.receive(peer)
        if word.size:
            raise MessageError(
                f"the message from rank {transport.ranks[peer]} has {word.size} bytes where rank "
                f"{transport.ranks[transport.rank]} awaits an empty one, its turn; every rank must "
                "use the same k"
            )


def go_aheads(holders: int, guests: int, k: int) -> int:
    """Return how many go-aheads are sent before the swaps of blocks of `holders` ranks."""
    # The late blocks are the first ones, and blocks pair up with their neighbours: one pair is of a
    # late block and one that is ahead where their number is odd, else none.
    late_blocks = -(-guests // holders)
    return holders if k >= LONG_ENTRIES and late_blocks % 2 else 0

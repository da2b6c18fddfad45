"""Swap: two ranks exchange their lists, and both merge the same two.

A long list travels in pieces, so that one is encoded, decoded and merged while the next is on its
way. Pieces are cut by position: all are equally long, wherever the indices lie. A piece that comes
in is merged with what lies in its range of indices here; the k largest are taken at the end, of
all that the ranges kept. The result has the bits that whole lists give.

    mine     2 | 3 5 | 8 9          3 pieces
    theirs   1 | 4 6 | 7 9          1 reaches to index 1, merged with none of mine
                                    4 6 reaches to index 6, merged with 2 3 5
                                    7 9 is the last piece, merged with 8 9
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Final, NamedTuple

from .. import wire
from ..errors import MessageError
from ..kernels import merge
from ..transports.transport import Transport
from ..vector import Array, SparseVector
from .gtopk_options import GtopkOptions
from .outcome import lowest, put_together
from .rounding import rounding_error

# Pieces begin at multiples of it, as do the blocks of values that share a scale.
_BLOCK: Final = 256


class Swapped(NamedTuple):
    """What both ranks hold after a swap, and what this one's list lost on the way.

    dropped: the other nonzero entries of the sum.
    error:   this rank's share of the rounding of the list it sent.
    """

    merged: SparseVector
    dropped: SparseVector
    error: SparseVector
    refused_by: int


def swap_and_merge(
    mine: SparseVector,
    refused_by: int,
    keep: int,
    transport: Transport,
    peer: int,
    options: GtopkOptions,
    holders: int,
) -> Swapped:
    """Return the `keep` largest entries of the sum of both ranks' lists.

    holders: how many ranks hold `mine` alike, this one as number `rank % holders`.
    """
    whole = mine
    if options.pieces > 1 and options.format.values != "exact":
        # Rounded as a whole, as a single message would: rounded once more, the pieces stay as is.
        whole = wire.encode(mine, keep, options.format).vector
    rounded, errors = [], []

    def messages(refused_by: int) -> Iterator[tuple[Array, int]]:
        for piece, cut in enumerate(_cuts(mine.entries, options.pieces)):
            encoded = wire.encode(
                whole.at(cut),
                keep,
                options.format,
                extra=options.stamp(piece),
                refused_by=refused_by,
                number=transport.begun,
            )
            rounded.append(encoded.vector)
            first = (transport.rank - cut.start) % holders
            error = rounding_error(mine.at(cut), encoded.vector, options.format, first, holders)
            errors.append(error)
            yield encoded.message, peer

    incoming = transport.exchange_all(messages(refused_by), [peer] * options.pieces)
    ours = put_together(rounded)  # all are on their way

    kept, dropped = [], []
    begin = 0
    for piece, message in enumerate(incoming):
        decoded = _read(message, transport, peer, mine, keep, options, piece)
        refused_by = lowest(refused_by, decoded.refused_by)
        theirs = decoded.vector
        here = ours
        if options.pieces > 1:
            end = _end_of(theirs, begin, piece, transport.ranks[peer])
            end = mine.length if piece == options.pieces - 1 else end
            here, begin = ours.between(begin, end), end
        largest, rest = merge(here, theirs, keep)
        kept.append(largest)
        dropped.append(rest)
    if options.pieces > 1:
        largest, rest = merge(put_together(kept), mine.at(slice(0)), keep)
        kept, dropped = [largest], [*dropped, rest]
    return Swapped(kept[0], put_together(dropped), put_together(errors), refused_by)


def _end_of(theirs: SparseVector, begin: int, piece: int, sender: int) -> int:
    """Return up to which index a piece reaches that must begin at `begin` or behind it."""
    if not theirs.entries:
        return begin
    # The first and the last at once: on a GPU the host waits for them.
    first, *_, last = theirs.indices[:: max(1, theirs.entries - 1)].tolist() * 2
    if first < begin:
        raise MessageError(
            f"the message from rank {sender} is malformed: piece {piece} begins at index {first}, "
            f"the one before ended at {begin - 1}"
        )
    return int(last) + 1


def _cuts(entries: int, pieces: int) -> list[slice]:
    """Return the positions of each piece of a list; all but the last are of whole blocks."""
    blocks = -(-entries // _BLOCK)
    ends = [min(entries, blocks * number // pieces * _BLOCK) for number in range(pieces + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(ends)]


def _read(
    message: Array,
    transport: Transport,
    peer: int,
    like: SparseVector,
    keep: int,
    options: GtopkOptions,
    piece: int,
) -> wire.Decoded:
    sender, stamp_bytes = transport.ranks[peer], options.stamp().size
    decoded = wire.decode(
        message, like, keep, sender, options.format, stamp_bytes, number=transport.begun
    )
    options.check_stamp(decoded.extra, piece, sender)
    return decoded

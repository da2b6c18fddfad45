"""Schedules: the messages of each algorithm, round by round, in entries and bytes.

Assumptions: every rank picks k entries; merged lists are as long as they may be; oktopk's regions
are equally full. Formulas: Shi et al. 2019, section II and table I, with the recursive doubling of
`gtopk`; Li and Hoefler 2022, section 3.

    algorithm        rounds                        a rank sends
    dense            2 log2 P, with acks           2(P-1)/P n values
    topk-allgather   log2 P (Bruck)                (P-1) lists of k entries
    gtopk-tree       2 log2 P                      a list up, and one down to every child
    gtopk            log2 P, 2 to fold, pacing    log2 P lists, the last ones longer with growth
    oktopk           P-1 at once, + some log2 P    2(P-1)/P k entries
    hierarchical     as gtopk on one rank a node   k entries inside its node twice, k/m across
    shards           P-1 at once, + log2 P         2(P-1)/P k values, no indices

Also here: the bytes of messages in each wire format.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np

from ..algorithms.conservation import alive_bytes
from ..algorithms.gtopk import go_aheads, kept_sizes
from ..algorithms.regions import QUANTILES_PER_RANK
from ..algorithms.shards import STAMP_BYTES
from ..algorithms.threshold import NUMBERS_BYTES, QUANTILES
from ..cost import rounds
from ..transports.reductions import LONG_BYTES, is_gathered_whole
from ..vector import Array, index_dtype
from ..wire import EXACT, HEADER_BYTES, WHOLE, Format
from ..wire.format import INDEX_CODES, VALUE_CODES

FORMATS: Final = tuple(Format(indices, values) for indices in INDEX_CODES for values in VALUE_CODES)

_BLOCK: Final = 1 << 16
_LONG: Final = 1 << 7  # numbers in blocks take a further byte for each factor of this
# Rice codes take so many bits an entry more than the entropy of uniform positions.
_ABOVE_ENTROPY_BITS: Final = 0.2
_RICE_PADDING_BYTES: Final = 24
# Their worst case is equal gaps: so many bits an entry more than a gap's, with a width per 64
# entries; and the padding of four parts, with a long first gap.
_ABOVE_GAP_BITS: Final = 2.0 + 8 / 64
_MOST_RICE_PADDING_BYTES: Final = 40


def message_bytes(
    entries: int, length: int, format: Format = EXACT, value_bytes: int = 4, parts: int = 1
) -> float:
    """Return the bytes of a message: exact for raw indices, else expected.

    Positions are assumed to be spread evenly over one of `parts` parts of the length. Those of a
    real gradient are clustered, and take less when packed.
    """
    if format.indices == "blocks":
        blocks = math.ceil(length / parts / _BLOCK)
        indices = 2.0 * entries + _expected_count_bytes(entries, blocks)
    elif format.indices == "packed":
        bits = entropy_bits(entries * parts / length) + _ABOVE_ENTROPY_BITS
        indices = entries * bits / 8 + _RICE_PADDING_BYTES
    else:
        indices = _plain_index_bytes(entries, length, format)
    return _with_values(indices, entries, format, value_bytes)


def most_message_bytes(
    entries: int, length: int, format: Format = EXACT, value_bytes: int = 4, parts: int = 1
) -> float:
    """Return the most bytes of a message, wherever its entries lie in one of `parts` parts.

    It is also a bound on the mean of several messages, for the mean of their entries and parts. For
    packed indices it is not strict: gaps that differ extremely within a group of 64 take more.
    Clusters, as in real gradients, take less.
    """
    if format.indices == "blocks":
        blocks = length / _BLOCK + 1
        # A part may begin inside a block; a run of empty blocks comes before it.
        in_part = blocks if parts == 1 else blocks / parts + 2
        indices = 2.0 * entries + _most_count_bytes(entries, in_part, blocks)
    elif format.indices == "packed":
        bits = math.log2(max(1.0, length / parts / max(1, entries))) + _ABOVE_GAP_BITS
        indices = entries * bits / 8 + _MOST_RICE_PADDING_BYTES
    else:
        indices = _plain_index_bytes(entries, length, format)
    return _with_values(indices, entries, format, value_bytes)


def _plain_index_bytes(entries: int, length: int, format: Format) -> float:
    return 0.0 if format.indices == WHOLE else float(entries * index_dtype(length).itemsize)


def _with_values(index_bytes: float, entries: int, format: Format, value_bytes: int) -> float:
    code = VALUE_CODES[format.values]
    element = code.element_bytes(value_bytes)
    padded = math.ceil(index_bytes / element) * element
    return HEADER_BYTES + padded + code.size_bytes(entries, value_bytes)


def _expected_count_bytes(entries: int, blocks: int) -> float:
    """Return the expected bytes of the blocks' entry counts, for entries that are spread evenly.

    A count for each block with entries; a mark and a length for each run of empty blocks.
    """

    def empty(number: int) -> float:
        """Return the probability that so many given blocks have no entries."""
        return max(0.0, 1.0 - number / blocks) ** entries

    def runs(least: int) -> float:
        """Return the expected number of runs of at least `least` empty blocks."""
        return max(0, blocks - least) * (empty(least) - empty(least + 1))

    # A byte counts up to 127 entries; decided by a block's mean.
    count_bytes = 1 if entries < _LONG * blocks else 2
    counts = count_bytes * blocks * (1.0 - empty(1))
    return counts + 2 * runs(1) + runs(_LONG)


def _most_count_bytes(entries: int, in_part: float, blocks: float) -> float:
    """Return the most bytes of the counts: every second block has entries, and some have many."""
    # Three bytes for each block after a run of empty ones: a mark, the run's length, a count.
    most = 3.0 * min(entries, in_part / 2)
    many, longer = float(_LONG), blocks / _LONG
    # And another byte for each further factor of 128, both in counts and in runs.
    while many <= _BLOCK:
        most += min(in_part, entries / many)
        many *= _LONG
    while longer >= 1:
        most += min(entries, longer)
        longer /= _LONG
    return most


def entropy_bits(density: float) -> float:
    """Return the entropy bound of an entry's position, in bits: H(density) / density."""
    if not 0.0 < density < 1.0:
        return 0.0
    rest = 1.0 - density
    return -(density * math.log2(density) + rest * math.log2(rest)) / density


# Ok-Topk's other calls, in units of a list's `send_seconds`, by the processor time of short lists:
# of a round of the threshold's search; of the gather and everything else that is done once.
SEARCH_SENDS: Final = 6
GATHER_SENDS: Final = 6


class Round(NamedTuple):
    """A round: the messages that ranks send at the same time, and the work for the largest of them.

    senders: how many ranks send one.
    leaving: the most of these on one node that send to another node; 0: none does.
    lists:   sparse lists in a message, each with a header.
    entries: of each list.
    parts:   a list's entries all lie in one of so many parts of the vector.
    exact:   values are sent without rounding, whatever the format.
    raw:     indices are sent raw, whatever the format.
    plain_bytes: further bytes of the message: values without indices, bits, sizes.
    encoded, decoded, merged: entries that a rank encodes before, decodes and merges afterwards.
    summed:  entries of lists that are summed pairwise afterwards, times the number of passes.
    swaps, others, sends: how often a rank has `swap_seconds`, `list_seconds` and `send_seconds`.
    times:   the number of equal rounds that this stands for.
    waits:   latencies of all these rounds together, fewer than `times` if their messages are sent
             at once; None: `times`.
    fresh:   its senders have not sent yet, while others have.
    """

    senders: int
    leaving: int
    lists: int = 1
    entries: int = 0
    plain_bytes: float = 0.0
    encoded: int = 0
    decoded: int = 0
    merged: int = 0
    summed: float = 0.0
    swaps: int = 0
    others: int = 0
    sends: int = 0
    times: int = 1
    parts: int = 1
    exact: bool = False
    raw: bool = False
    fresh: bool = False
    waits: int | None = None

    def format(self, requested: Format) -> Format:
        """Return the format of its lists in a reduction with format `requested`."""
        return Format(
            "raw" if self.raw else requested.indices, "exact" if self.exact else requested.values
        )


class Order(NamedTuple):
    """The reduction to schedule: k of `length` values of `value_bytes`, on `ranks` ranks.

    widening: entries of the update / k: gtopk's growth, oktopk's k_out / k.
    uneven:   assume the worst distribution of picks, in which a rank sends the most possible.
    native_bytes: as in `Network`; only dense uses it.
    """

    length: int
    k: int
    ranks: int
    ranks_per_node: int = 1
    value_bytes: int = 4
    widening: float = 1.0
    uneven: bool = False
    native_bytes: int = sys.maxsize

    @property
    def k_out(self) -> int:
        """Return how many entries the update may have."""
        return round(min(self.length, self.widening * self.k))

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.ranks_per_node)


def leaving(sources: Array, targets: Array, ranks_per_node: int) -> int:
    """Return the most messages that leave one node; sources, targets: ranks, int [m]."""
    nodes = sources // ranks_per_node
    outside = nodes[nodes != targets // ranks_per_node]
    return int(np.bincount(outside).max()) if outside.size else 0


def leaving_by_shift(distance: int, ranks: int, ranks_per_node: int) -> int:
    """Return `leaving` if every rank r sends to r + distance mod P."""
    if ranks <= ranks_per_node:
        return 0
    return min(distance, ranks - distance, ranks_per_node)


def dense(order: Order) -> Iterator[Round]:
    """Yield a reduce-scatter and an allgather, with optimal rounds and bytes.

    This is what `transports.reductions` does: after each round of long messages the receivers
    acknowledge them. (Only the acknowledgement of a message's last piece takes time of its own.) A
    library's own allreduce is assumed to do the same, without acknowledgements.
    """
    ranks, whole_bytes = order.ranks, order.length * order.value_bytes
    distances = [1 << number for number in range(rounds(ranks))]
    if is_gathered_whole(whole_bytes, ranks):  # every rank gets all vectors, and sums them
        block_bytes: float = whole_bytes
    else:
        block_bytes = whole_bytes / ranks
        distances = [*reversed(distances), *distances]
    for distance in distances:
        # One message leaves a node per round, as in an allreduce that is aware of nodes.
        outside = min(1, leaving_by_shift(distance, ranks, order.ranks_per_node))
        blocks = min(distance, ranks - distance)
        each = Round(ranks, outside, lists=0, plain_bytes=blocks * block_bytes)
        yield each
        if each.plain_bytes >= LONG_BYTES and whole_bytes < order.native_bytes:
            yield each._replace(plain_bytes=0)


def topk_allgather(order: Order) -> Iterator[Round]:
    """Yield the allgather of all lists, which are decoded and summed after the last round."""
    k, ranks = order.k, order.ranks
    if ranks > 1:
        *gathered, last = _allgather(ranks, order.ranks_per_node, 0, k)
        yield from gathered
        final = last._replace(decoded=ranks * k, summed=ranks * k * rounds(ranks))
        yield final._replace(swaps=1, others=ranks - 1)


def gtopk_tree(order: Order) -> Iterator[Round]:
    """Yield the merges up to rank 0, then the broadcast down, in reverse."""
    k, ranks = order.k, order.ranks
    up = []
    distance = 1
    while distance < ranks:
        sources = np.arange(distance, ranks, 2 * distance)
        outside = leaving(sources, sources - distance, order.ranks_per_node)
        step = Round(sources.size, outside, 1, k, encoded=k, decoded=k, merged=2 * k, swaps=1)
        up.append(step._replace(fresh=True))
        distance *= 2
    yield from up
    for step in reversed(up):
        down = step._replace(plain_bytes=alive_bytes(k), merged=0, swaps=0, others=1, exact=True)
        yield down._replace(fresh=step is up[-1])


def gtopk(order: Order) -> Iterator[Round]:
    """Yield recursive doubling; ranks beyond the largest power of two are folded in and out."""
    k, ranks, m = order.k, order.ranks, order.ranks_per_node
    paired = 1 << (ranks.bit_length() - 1)
    paired_ranks, guests = np.arange(paired), np.arange(paired, ranks)
    sizes = list_sizes(order)
    folded = leaving(guests, guests - paired, m)
    if guests.size:
        yield Round(guests.size, folded, 1, k, encoded=k, decoded=k, merged=2 * k, swaps=1)
    # The result of the last merge is not sent.
    for number, size in enumerate(sizes[:-1]):
        outside = leaving(paired_ranks, paired_ranks ^ (1 << number), m)
        if count := go_aheads(1 << number, guests.size, k):
            yield Round(count, min(outside, count), lists=0)
        both = Round(paired, outside, 1, size, encoded=size, decoded=size, merged=2 * size)
        yield both._replace(swaps=1, fresh=number == 0)
    if guests.size:
        size = sizes[-1]
        back = Round(guests.size, folded, 1, size, alive_bytes(k), encoded=size, decoded=size)
        yield back._replace(others=1, exact=True)


def list_sizes(order: Order) -> list[int]:
    """Return the entries of gtopk's lists before each round, and at the end.

    A merge keeps as many as it may, but has no more than both lists together.
    """
    kept = kept_sizes(order.k, order.widening, order.ranks.bit_length() - 1, order.length)
    return [order.k, *(min(size, order.k << number) for number, size in enumerate(kept, 1))]


def oktopk(order: Order) -> Iterator[Round]:
    """Yield split, threshold and gather, for boundaries that are known and regions that are even.

    order.uneven: all picks are in other ranks' regions, all blocks have to be balanced, and new
    boundaries take an allgather.
    """
    k, ranks, m = order.k, order.ranks, order.ranks_per_node
    if ranks == 1:
        return
    if order.uneven:
        entry = index_dtype(order.length).itemsize + order.value_bytes
        yield from _allgather(ranks, m, HEADER_BYTES + QUANTILES_PER_RANK * ranks * entry)
    others = ranks - 1
    regions = others if order.uneven else ranks
    part = -(-k // regions)
    for number, (outside, times) in enumerate(_splits(ranks, m)):
        split = Round(ranks, outside, 1, part, encoded=part, decoded=part, others=1, sends=1)
        yield split._replace(times=times, parts=regions, waits=int(number == 0))  # sent at once
    # A round of the threshold leaves two quantiles undecided; in the last each entry is a quantile.
    undecided = order.k_out if order.uneven else k  # of an owner
    sampled = HEADER_BYTES + NUMBERS_BYTES + min(QUANTILES, order.k_out) * order.value_bytes
    while True:
        *earlier, last = _allgather(ranks, m, sampled)
        yield from earlier
        yield last._replace(others=others, sends=SEARCH_SENDS)
        if undecided <= QUANTILES:
            break
        undecided = -(-2 * undecided // QUANTILES)
    if order.uneven:
        yield Round(ranks, 0, 1, -(-order.k_out // others), times=others, parts=others)
    block = -(-order.k_out // ranks)
    # A rank's own block, which it sends in each round, may be spread over the whole vector.
    parts = max(1, others // rounds(ranks)) if order.uneven else ranks
    *gathered, last = _allgather(ranks, m, 0, block, parts)
    yield from gathered
    decoded = last._replace(decoded=ranks * block, merged=k)
    decoded = decoded._replace(summed=(k + ranks * block) * rounds(ranks))
    yield decoded._replace(others=others, sends=GATHER_SENDS)


@lru_cache
def _splits(ranks: int, ranks_per_node: int) -> list[tuple[int, int]]:
    """Return `leaving` of the shifts by 1..P-1: its values, each with the number of shifts."""
    shifts = (leaving_by_shift(distance, ranks, ranks_per_node) for distance in range(1, ranks))
    return list(Counter(shifts).items())


def hierarchical(order: Order) -> Iterator[Round]:
    """Yield the picks of a shard to its owner, gtopk of the owners across nodes, and back.

    Inside a node lists are sent raw and exact. order.uneven: a rank's picks are all in others'
    shards, or all ranks' in its own. Not modelled: oktopk across nodes, and dense sums inside.
    """
    m = min(order.ranks_per_node, order.ranks)
    part = -(-order.k // m)
    others = m - 1
    sent, received = (order.k, order.k) if order.uneven else (others * part, part)
    if others:
        inside = Round(order.ranks, 0, 1, -(-sent // others), exact=True, raw=True, times=others)
        inside = inside._replace(waits=1)
        summed = m * part * rounds(m) / others
        yield inside._replace(encoded=part, decoded=part, summed=summed, swaps=1)
    shard = order._replace(
        length=-(-order.length // m), k=part, ranks=order.nodes, ranks_per_node=1
    )
    for step in gtopk(shard):
        # The owners of all shards reduce at the same time, and share their node's link.
        yield step._replace(senders=m * step.senders, leaving=m, parts=m)
    if others:
        result = list_sizes(shard)[-1]
        back = Round(order.ranks, 0, 1, result, alive_bytes(received), exact=True, raw=True)
        back = back._replace(encoded=result, decoded=result, others=1, times=others)
        yield back._replace(waits=1)


def shards(order: Order) -> Iterator[Round]:
    """Yield a shard's parts to their owners, and the allgather of the sums."""
    ranks, m = order.ranks, order.ranks_per_node
    if ranks == 1:
        return
    part = -(-order.k // ranks)
    for number, (outside, times) in enumerate(_splits(ranks, m)):
        split = Round(ranks, outside, 1, part, STAMP_BYTES, encoded=part, decoded=part, others=1)
        yield split._replace(sends=1, times=times, waits=int(number == 0))  # sent at once
    *gathered, last = _allgather(ranks, m, STAMP_BYTES, part)
    yield from gathered
    yield last._replace(decoded=(ranks - 1) * part, others=ranks - 1)


def _allgather(
    ranks: int, ranks_per_node: int, plain_bytes: float, entries: int = 0, parts: int = 1
) -> Iterator[Round]:
    """Yield an allgather of messages of `plain_bytes`, or of lists of `entries` entries."""
    for number in range(rounds(ranks)):
        messages = min(1 << number, ranks - (1 << number))
        yield Round(
            ranks,
            leaving_by_shift(1 << number, ranks, ranks_per_node),
            messages if entries else 0,
            entries,
            plain_bytes=8 * (1 + messages) + messages * plain_bytes,
            encoded=entries if number == 0 else 0,
            parts=parts,
        )


SCHEDULES: dict[str, Callable[[Order], Iterator[Round]]] = {
    "dense": dense,
    "topk-allgather": topk_allgather,
    "gtopk-tree": gtopk_tree,
    "gtopk": gtopk,
    "oktopk": oktopk,
    "hierarchical": hierarchical,
    "shards": shards,
}


@lru_cache(1024)
def schedule(algorithm: str, order: Order) -> tuple[Round, ...]:
    """Return the rounds of an algorithm; cached, as searches over links and formats reuse it."""
    return tuple(SCHEDULES[algorithm](order))

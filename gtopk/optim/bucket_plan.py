"""The plan: which parameters share a bucket, and in which order the buckets are exchanged.

Backward produces gradients from the last layer to the first. A bucket is exchanged as soon as it is
full, while backward goes on; only the exchange of the last one, the smallest, is not hidden.

    backward   |  a b c  |  d e f  |  g h  |
    engine               [ abc ]   [ def ] [ gh ]
                                           ^ synchronize

Every exchange has some latency, so buckets are merged until the latency is a small part of an
exchange, by the cost model. The model's links are assumed, not measured, so that a program makes
the same buckets wherever and whenever it runs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from collectives.cost_model import Candidate, predict
from collectives.cost_model.calibration import assumed

from ..compression import Automatic, GTopK, SparseCompression

# Agreement, and the way to the engine's thread and back: 0.5 ms where a core is free, and 2 to 3
# where all cores compute, as with two ranks on two (docs/measured/overhead.md).
OPERATION_SECONDS: Final = 2e-3
# Least time for a bucket's contents over that for an empty bucket: for the last ones, for others.
WORTH_AN_OPERATION: Final = 1.0
WORTH_CLOSING: Final = 4.0
# Limits, as links may be faster than assumed, while the engine's own time stays.
MOST_FULL_BUCKETS: Final = 16
# Over gloo on one host ResNet-50's gradient took 1.3 times as long, dense, in buckets of a 16th as
# in those of an eighth; over MPI as long. From DDP's 25 MiB on larger ones gain nothing.
FULL_DENSE_SHARE: Final = 8
FULL_DENSE_BYTES: Final = 25 << 20
# A GPU selects from any model in less than the host takes to launch that and to wait for it, so
# more than three buckets, of a half and two quarters, cost more than they hide. Not measured yet.
FULL_SHARE_ON_GPU: Final = 2
LEAST_SHARE_ON_GPU: Final = 5  # less than the quarters, which are never exactly so large
_SMALLEST, _LARGEST = 1 << 10, 1 << 30  # elements


class Sizes(NamedTuple):
    """Sizes of buckets in elements: the least that is worth an operation, and a full bucket."""

    least: int
    full: int


ONE_BUCKET: Final = Sizes(_LARGEST, _LARGEST)


def sizes_for(
    compression: object, total: int, ranks: int, value_bytes: int = 4, *, on_gpu: bool = False
) -> Sizes:
    """Return the sizes of buckets for `total` elements, by the cost model.

    on_gpu: whether kernels on a GPU work on them.
    """
    least = _elements(WORTH_AN_OPERATION, compression, ranks, value_bytes)
    full = _elements(WORTH_CLOSING, compression, ranks, value_bytes)
    if on_gpu and isinstance(compression, SparseCompression | Automatic):
        half, least_share = -(-total // FULL_SHARE_ON_GPU), -(-total // LEAST_SHARE_ON_GPU)
        return Sizes(max(least, least_share), max(full, half))
    if not isinstance(compression, SparseCompression | Automatic):
        share = -(-total // FULL_DENSE_SHARE)
        full = max(full, min(share, FULL_DENSE_BYTES // value_bytes))
    return Sizes(least, max(full, -(-total // MOST_FULL_BUCKETS)))


def _elements(worth: float, compression: object, ranks: int, value_bytes: int) -> int:
    """Return the power of 2 of elements that take `worth` times the latency of their exchange."""
    if isinstance(compression, Automatic):  # it may choose dense, which needs no larger buckets
        compression = GTopK(compression.density or 0.001)
    if isinstance(compression, SparseCompression):
        candidate = compression.candidate(compression.formats()[0])
    else:
        candidate = Candidate("dense")
    calibration = assumed(ranks)
    network, rates = calibration.network, calibration.rates.without_calls()
    length = _SMALLEST
    while length < _LARGEST:
        expected = predict(candidate, length, network, rates, value_bytes)
        latency = OPERATION_SECONDS + expected.latency_seconds
        if expected.seconds - expected.latency_seconds >= worth * latency:
            break
        length *= 2
    return length


def fill(order: Sequence[int], lengths: Sequence[int], sizes: Sizes) -> list[list[int]]:
    """Return the parameters, by number, in buckets.

    A bucket is closed when it is full, or when it is worth an operation and not smaller than all
    that follows: towards the end of backward buckets become small, as the last one is not hidden.
    What follows a bucket that is not full must be worth an operation, too, or it joins it.

    order: the parameters to place, in the order in which their gradients are complete.
    """
    rest = sum(lengths[number] for number in order)
    buckets: list[list[int]] = [[]]
    length = 0
    for number in order:
        buckets[-1].append(number)
        length += lengths[number]
        rest -= lengths[number]
        small_enough = rest >= sizes.least and length >= max(sizes.least, rest)
        if rest and (length >= sizes.full or small_enough):
            buckets.append([])
            length = 0
    return [bucket for bucket in buckets if bucket]


def buckets_by(
    compression: object, lengths: Sequence[int], ranks: int, *, on_gpu: bool = False
) -> int:
    """Return the number of buckets; lengths: in the order in which gradients are complete."""
    sizes = sizes_for(compression, sum(lengths), ranks, on_gpu=on_gpu)
    return len(fill(range(len(lengths)), lengths, sizes))


def number_of_groups(order: Sequence[int], groups: int) -> list[list[int]]:
    """Return the parameters in `groups` buckets of equally many parameters, or one more."""
    groups = max(1, min(groups, len(order)))
    size, more = divmod(len(order), groups)
    buckets, begin = [], 0
    for group in range(groups):
        end = begin + size + (group < more)
        buckets.append(list(order[begin:end]))
        begin = end
    return buckets


@dataclass(frozen=True)
class Part:
    """Parameters, by number, that are exchanged together, and how."""

    how: Literal["compressed", "dense", "sparse"]
    numbers: list[int]


def arrange(
    order: Sequence[int],
    lengths: Sequence[int],
    sizes: Sizes,
    *,
    groups: Sequence[Sequence[int]] | int = (),
    dense: Collection[int] = (),
    sparse: Collection[int] = (),
) -> list[Part]:
    """Return the parts of a step, the first to be complete first.

    order:  of all parameters, as backward completes them.
    groups: buckets made by hand; or the number of buckets for all parameters that are neither dense
            nor sparse.
    dense:  parameters that are sent whole with any compression.
    sparse: parameters whose gradients are sparse tensors: each is a part by itself.
    """
    compressed = [n for n in order if n not in sparse and n not in dense]
    if isinstance(groups, int):
        buckets = number_of_groups(compressed, groups)
    else:
        buckets = [[n for n in group if n in compressed] for group in groups]
        grouped = {n for bucket in buckets for n in bucket}
        buckets += fill([n for n in compressed if n not in grouped], lengths, sizes)
    parts = [Part("compressed", bucket) for bucket in buckets if bucket]
    whole = [n for n in order if n in dense and n not in sparse]
    parts += [Part("dense", whole)] if whole else []
    parts += [Part("sparse", [n]) for n in order if n in sparse]
    place = {number: at for at, number in enumerate(order)}
    return sorted(parts, key=lambda part: max(place[number] for number in part.numbers))

"""The plan (bucket layout): which parameters share a bucket, and the order of the buckets.

Backward produces gradients from the last layer to the first. A bucket is exchanged as soon as it is
full, while backward continues; only the exchange of the last and smallest one is not hidden.

    backward   |  a b c  |  d e f  |  g h  |
    engine               [ abc ]   [ def ] [ gh ]
                                           ^ synchronize

Every exchange has some latency, so buckets are merged until latency is a small part of an exchange,
according to the cost model. The model's links are assumed, not measured, so that a program has the
same buckets everywhere and in every run. Rank 0 arranges them, and all ranks follow (`Plan`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch

from collectives.cost_model import Candidate, predict
from collectives.cost_model.calibration import assumed
from collectives.transports import Transport

from ..compression import Automatic, GTopK, NoneCompressor, SparseCompression
from ..exchange.bucket_exchange import attach_adam, open_bucket_exchange
from ..exchange.buckets.arrays import device_of
from ..exchange.buckets.parameters import describe_parameter
from ..exchange.exchange import DenseExchange, Progress, open_residual
from ..exchange.sparse_gradients import AnyBucketExchange, SparseGradientExchange
from .options import Options

# Agreement, plus the round trip to the engine's thread: 0.5 ms if a core is free, 2 to 3 ms if all
# cores compute, such as with two ranks on two cores (docs/measured/overhead.md).
OPERATION_SECONDS: Final = 2e-3
# Least time for a bucket's contents, relative to an empty bucket: for the last ones, for others.
WORTH_AN_OPERATION: Final = 1.0
WORTH_CLOSING: Final = 4.0
# Limits, because links may be faster than assumed, while the engine's own time stays the same.
MOST_FULL_BUCKETS: Final = 16
# Over gloo on one host, ResNet-50's dense gradient took 1.3 times as long in buckets of a 16th as
# in buckets of an eighth; over MPI equally long. Beyond DDP's 25 MiB, larger ones gain nothing.
FULL_DENSE_SHARE: Final = 8
FULL_DENSE_BYTES: Final = 25 << 20
# A GPU selects from any model faster than the host launches that and waits for it, so more than
# three buckets, of a half and two quarters, cost more than they hide. Not measured yet.
FULL_SHARE_ON_GPU: Final = 2
LEAST_SHARE_ON_GPU: Final = 5  # below a quarter, since quarters are never exact
_SMALLEST, _LARGEST = 1 << 10, 1 << 30  # elements


class Sizes(NamedTuple):
    """Bucket sizes in elements: the least that is worth an operation, and that of a full bucket."""

    least: int
    full: int


ONE_BUCKET: Final = Sizes(_LARGEST, _LARGEST)


def sizes_for(
    compression: object, total: int, ranks: int, value_bytes: int = 4, *, on_gpu: bool = False
) -> Sizes:
    """Return bucket sizes for `total` elements, according to the cost model.

    on_gpu: whether kernels on a GPU process the buckets.
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
    """Return the smallest power of 2 of elements that takes `worth` times the exchange latency."""
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
    """Distribute parameters over buckets; return their numbers, by bucket.

    A bucket is closed when it is full, or when it is worth an operation and not smaller than all
    that follows: buckets shrink towards the end of backward, because the last one is not hidden.
    If the rest after a bucket that is not full is not worth an operation, it joins that bucket.

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


def count_buckets(
    compression: object, lengths: Sequence[int], ranks: int, *, on_gpu: bool = False
) -> int:
    """Return the number of buckets; lengths: in the order in which gradients are complete."""
    sizes = sizes_for(compression, sum(lengths), ranks, on_gpu=on_gpu)
    return len(fill(range(len(lengths)), lengths, sizes))


def split_evenly(order: Sequence[int], groups: int) -> list[list[int]]:
    """Distribute parameters over `groups` buckets; their counts differ by at most one."""
    parts = np.array_split(np.array(order), max(1, min(groups, len(order))))
    return [part.tolist() for part in parts]


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
    """Return the parts of a step, in the order in which they are complete.

    order:  of all parameters, as backward completes them.
    groups: buckets set by hand; or the number of buckets for all parameters that are neither dense
            nor sparse.
    dense:  parameters that are sent in full whatever the compression.
    sparse: parameters with sparse gradients: each is a part of its own.
    """
    compressed = [n for n in order if n not in sparse and n not in dense]
    if isinstance(groups, int):
        buckets = split_evenly(compressed, groups)
    else:
        buckets = [[n for n in group if n in compressed] for group in groups]
        grouped = {n for bucket in buckets for n in bucket}
        buckets += fill([n for n in compressed if n not in grouped], lengths, sizes)
    parts = [Part("compressed", bucket) for bucket in buckets if bucket]
    whole = [n for n in order if n in dense and n not in sparse]
    parts += [Part("dense", whole)] if whole else []
    parts += [Part("sparse", [n]) for n in order if n in sparse]
    # A part is complete when its last gradient is.
    positions = {number: position for position, number in enumerate(order)}
    return sorted(parts, key=lambda part: max(positions[number] for number in part.numbers))


class Agreed(NamedTuple):
    """The layout that all ranks use.

    parts:   the buckets, as rank 0 arranged them.
    steps:   taken by rank 0: only some ranks may have loaded a checkpoint.
    records: of the buckets in rank 0's checkpoint.
    unsent:  names of parameters with a residual on any rank.
    sparse:  names of parameters with sparse gradients on any rank.
    are_new: `Plan.is_new` of each rank.
    """

    parts: list[Part]
    steps: int
    records: list[dict[str, Any]]
    unsent: set[str]
    sparse: set[str]
    are_new: Sequence[bool]


@dataclass(frozen=True)
class Plan:
    """One rank's inputs for the layout: call `agree`, then `open_bucket_exchanges`.

    trained: the parameters that may have a gradient; names: their names.
    order:  the parameters with complete gradients, in that order; the others follow.
    sparse: names of parameters with sparse gradients on this rank.
    records: of the buckets in a checkpoint; empty if there is nothing to resume.
    steps:  taken by this rank.
    unsent: names of parameters with a residual on this rank.
    is_new: whether this rank has loaded a state, or not planned all of the parameters before.
    """

    options: Options
    trained: Sequence[torch.nn.Parameter]
    names: Sequence[str]
    order: Sequence[torch.nn.Parameter]
    sparse: Sequence[str]
    records: Sequence[Mapping[str, Any]]
    steps: int
    unsent: Sequence[str]
    is_new: bool

    def signature(self) -> list[str]:
        """Return the options, shapes, dtypes and strides that must be equal on all ranks."""
        signature = self.options.signature()
        for name, parameter in zip(self.names, self.trained, strict=True):
            description = describe_parameter(name, parameter)
            # Vectors follow memory order: different strides would add up different elements.
            if not parameter.is_contiguous():
                strides = torch.empty_like(parameter, device="meta").stride()
                description += f" of strides {list(strides)}"
            signature.append(description)
        return signature

    def agree(self, transport: Transport) -> Agreed:
        """Return rank 0's layout, on every rank; a collective.

        A parameter that is sparse, or has a residual, on any rank counts as such on all.
        """
        gathered = transport.gather_object([list(self.sparse), list(self.unsent), self.is_new])
        *names, are_new = zip(*gathered, strict=True)
        sparse, unsent = (set().union(*each) for each in names)
        # Only rank 0's: the order in which gradients became complete may differ between ranks.
        own_parts = self._arrange(sparse, transport.size) if transport.rank == 0 else []
        parts = [[part.how, part.numbers] for part in own_parts]
        announcement = transport.broadcast_object([parts, self.steps, list(self.records)])
        parts, steps, records = announcement
        agreed = [Part(how, numbers) for how, numbers in parts]
        return Agreed(agreed, steps, records, unsent, sparse, are_new)

    def open_bucket_exchanges(
        self, agreed: Agreed, name: str, progress: Progress, ranks: int
    ) -> list[AnyBucketExchange]:
        """Create the buckets of the agreed parts, empty, with room for unsent residuals."""
        parts = agreed.parts
        compressed = sum(self._elements(part) for part in parts if part.how == "compressed") or 1
        # The last bucket starts after backward has ended: it takes no room from the others.
        overlapped = [0 if part.how == "sparse" else self._elements(part) for part in parts[:-1]]
        bucket_exchanges = [
            self._open_bucket_exchange(
                part, f"{name}.{index}", progress, compressed, sum(overlapped[index:]), ranks
            )
            for index, part in enumerate(parts)
        ]
        for bucket_exchange in bucket_exchanges:
            bucket_exchange.accept_sparse(agreed.sparse)
            if not agreed.unsent.isdisjoint(bucket_exchange.names):
                bucket_exchange.start_draining()
        return bucket_exchanges

    def _elements(self, part: Part) -> int:
        return sum(self.trained[number].numel() for number in part.numbers)

    def _arrange(self, sparse: set[str], ranks: int) -> list[Part]:
        if self.options.sparse_as_dense:
            sparse = set()
        numbers = {parameter: number for number, parameter in enumerate(self.trained)}
        groups, order = self._preset_buckets(numbers)
        order += [numbers[parameter] for parameter in self.order if parameter in numbers]
        # Then parameters without a gradient yet, from the last layer to the first, like backward.
        order += reversed(range(len(self.trained)))
        feedback = self.options.feedback
        return arrange(
            # Each once, at its first place: a checkpoint's order precedes this run's backward.
            list(dict.fromkeys(order)),
            [parameter.numel() for parameter in self.trained],
            self._sizes(ranks),
            groups=groups,
            dense={
                number
                for parameter, number in numbers.items()
                if feedback is not None and feedback.is_dense(self.names[number], parameter)
            },
            sparse={number for number, name in enumerate(self.names) if name in sparse},
        )

    def _preset_buckets(
        self, numbers: Mapping[torch.nn.Parameter, int]
    ) -> tuple[list[list[int]] | int, list[int]]:
        """Return buckets set by the user or a checkpoint, and the order of their parameters."""
        groups = self.options.groups
        if isinstance(groups, int):
            return groups, []
        if groups is not None:
            # A group may include frozen parameters, which are in no bucket.
            return [[numbers[p] for p in group if p in numbers] for group in groups], []
        places = {name: number for number, name in enumerate(self.names)}
        buckets = [[places[n] for n in record["names"] if n in places] for record in self.records]
        return buckets, [number for bucket in buckets for number in bucket]

    def _sizes(self, ranks: int) -> Sizes:
        value_bytes = 8 if any(p.dtype == torch.float64 for p in self.trained) else 4
        if ranks == 1:
            return ONE_BUCKET  # no communication to hide
        if self.options.bucket_bytes is not None:
            elements = max(1, self.options.bucket_bytes // value_bytes)
            return Sizes(elements, elements)
        elements = sum(parameter.numel() for parameter in self.trained)
        on_gpu = device_of(self.trained).type == "cuda"
        return sizes_for(self.options.compression, elements, ranks, value_bytes, on_gpu=on_gpu)

    def _open_bucket_exchange(
        self,
        part: Part,
        name: str,
        progress: Progress,
        compressed: int,
        overlapped: int,
        ranks: int,
    ) -> AnyBucketExchange:
        """Create the bucket of a part.

        compressed: elements in all compressed buckets.
        overlapped: elements in this and later buckets that become ready during backward.
        """
        parameters = [self.trained[number] for number in part.numbers]
        names = [self.names[number] for number in part.numbers]
        if part.how == "sparse":
            return SparseGradientExchange(name, parameters[0], names[0])
        compression = self.options.compression if part.how == "compressed" else NoneCompressor
        elements = self._elements(part)
        budget_share = elements / compressed if part.how == "compressed" else 1.0
        room_share = elements / overlapped if overlapped else 1.0
        bucket_exchange = open_bucket_exchange(
            name, parameters, names, compression, progress, budget_share, room_share
        )
        feedback, adam, is_whole = self.options.feedback, self.options.adam, part.how == "dense"
        if feedback is not None and adam is not None:
            attach_adam(bucket_exchange, feedback, adam, ranks, whole=is_whole)
        elif feedback is not None and feedback.corrects and is_whole:
            # The wrapped optimizer has no momentum, so these parameters need it here, too.
            bucket_exchange.exchange = DenseExchange(
                open_residual(bucket_exchange.bucket, feedback)
            )
        return bucket_exchange

"""Sources of a rank's batches: the plan cuts them from a data set or from a stream.

All ranks must read the same stream. They compare the first samples of an iteration, column by
column:

    rank 0   (image, 3)    rank 1   (image', 3)     the same: a column that varies between samples
             (image, 5)             (image', 5)     is equal on all ranks

    rank 0   (image, 3)    rank 1   (image', 3)     unknown: the equal column has one value in all
             (image, 3)             (image', 3)     samples

Random augmentation may make columns differ. If each rank reads its own part of a stream, all
columns that vary differ between ranks. The order of a data set's samples is compared as a whole.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from collectives.errors import MismatchError
from collectives.transports import Transport
from collectives.vector import Array

from ..optim.step_checks import checksums
from ..runtime.coordinator.agreement import name_ranks
from .partitioning.cuts import Cut, Plan, cut_epoch, shuffled


def columns_of(block: Sequence[Any]) -> Array:
    """Return the number of samples, and two values for each column of the block.

    The values are whether the column varies between samples, and its checksum; both are 0 for a
    column without a checksum. uint32 [1 + 2 columns].
    """
    rows = [[checksum(part) for part in _parts(sample)] for sample in block]
    if len({len(row) for row in rows}) > 1:  # lists of different lengths, say
        rows = [[checksum(sample)] for sample in block]
    numbers = [len(block)]
    for column in zip(*rows, strict=True):
        has_checksum = any(column)
        # A single sample cannot show whether its column varies; assume that it does.
        numbers.append(has_checksum and (len(set(column)) > 1 or len(column) == 1))
        numbers.append(has_checksum and zlib.crc32(np.array(column, np.uint32).data))
    return np.array(numbers, np.uint32)


def checksum(value: Any, before: int = 0) -> int:
    """Return a checksum of tensors, arrays, numbers, strings, and mappings and lists of them.

    before: the checksum so far. Values without a checksum do not change it: objects of other
        classes, and meta, sparse, nested or quantized tensors.
    """
    if isinstance(value, torch.Tensor):
        has_values = value.layout is torch.strided and not (
            value.is_meta or value.is_nested or value.is_quantized
        )
        return zlib.crc32(checksums([value]).data, before) if has_values else before
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return zlib.crc32(np.ascontiguousarray(value).tobytes(), before)
    if isinstance(value, (bytes, bytearray)):
        return zlib.crc32(value, before)
    if isinstance(value, (str, int, float, complex, np.generic)):
        # Not hash(): Python salts the hash of a text differently in every process.
        return zlib.crc32(repr(value).encode(), before)
    if isinstance(value, (Mapping, list, tuple)):
        for part in _parts(value):
            before = checksum(part, before)
    return before


def describe_order(order: Sequence[Any]) -> str:
    """Return a short text for an epoch's order; it must be equal on all ranks."""
    if isinstance(order, range):  # may be too long to read
        return repr(order)
    try:
        if isinstance(order, torch.Tensor | np.ndarray):
            indices = np.asarray(order, np.int64)
        else:
            indices = np.fromiter(order, np.int64, len(order))
        digest = zlib.crc32(np.ascontiguousarray(indices).data)
    except (TypeError, ValueError, OverflowError):  # indices that are not numbers, such as names
        digest = checksum(order)
    return f"an order of {len(order)} samples of checksum {digest:08x}"


def _parts(value: Any) -> list[Any]:
    if isinstance(value, Mapping):  # sorted: ranks may have inserted keys in different orders
        return [value[key] for key in sorted(value, key=repr)]
    return list(value) if isinstance(value, (list, tuple)) else [value]


def require_same_samples(transport: Transport, own: Array) -> bool:
    """Return whether ranks have read the same samples; False if the columns cannot show it.

    own: this rank's `columns_of`. The result is the same on all ranks. Raises MismatchError, on
    every rank, if the samples differ.
    """
    rows = [row.view(np.uint32).tolist() for row in transport.allgather(own.view(np.uint8))]
    if len({(len(row), row[0]) for row in rows}) == 1:
        by_rank = [zip(row[1::2], row[2::2], strict=True) for row in rows]
        columns = [set(column) for column in zip(*by_rank, strict=True)]
        comparable = [column for column in columns if column != {(0, 0)}]
        equal = [column for column in comparable if len(column) == 1]
        if len(equal) == len(comparable):
            return True
        if equal:
            return any(varies for column in equal for varies, _ in column)
    sides: dict[str, list[int]] = {}
    for rank, row in zip(transport.ranks, rows, strict=True):
        side = f"{row[0]} samples of checksum {zlib.crc32(np.array(row, np.uint32).data):08x}"
        sides.setdefault(side, []).append(rank)
    begins = "; ".join(f"{side} on {name_ranks(ranks)}" for side, ranks in sides.items())
    raise MismatchError(
        f"the ranks read different streams, which begin with {begins}. adapt reads the whole "
        "stream on every rank and keeps the rank's share: let the data set yield the same samples, "
        "in the same order, on all ranks, without sharding by rank; augment in collate_fn"
    )


Order = Callable[[int], Sequence[int]]
Compare = Callable[[Array], None]
T = TypeVar("T")


class BatchSampler(Sampler[list[int]]):
    """Yields the indices of this rank's batches; `cuts` holds the cut of each batch drawn.

    A rank without samples in a step gets some of the step's samples, which are weighted with zero.
    """

    def __init__(self, plan: Plan, rank: int, length: int, drop_last: bool) -> None:
        self.plan = plan
        self.rank = rank
        self.length = length
        self.drop_last = drop_last
        self.order: Sequence[int] = ()  # of the epoch
        self.step = self.start = 0  # where the next iteration starts
        self.cuts: deque[Cut] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        # An iteration that was left may have drawn more batches than it handed out.
        self.cuts.clear()
        for cut in cut_epoch(self.plan, self.step, self.start, self.length, self.drop_last):
            # DataLoader draws ahead for its workers, so the cuts wait here in the order of the
            # batches.
            self.cuts.append(cut)
            yield [self.order[place] for place in cut.batch(self.rank)]


class DatasetSource:
    """A data set with a length: DataLoader workers get the indices of this rank's share.

    lead: number of steps that are cut before they are handed out, because workers prefetch them.
    signature: text that must be equal on all ranks.
    """

    def __init__(
        self, loader: DataLoader[Any], plan: Plan, rank: int, order: Order | None, seed: int
    ) -> None:
        length = len(loader.dataset)  # type: ignore[arg-type]
        self._order = order or order_of(loader, length, seed)
        # The order's length, not the data set's: order= may leave samples out.
        self._sampler = BatchSampler(plan, rank, len(self._order(0)), loader.drop_last)
        self._loader = rebuilt(loader, batch_sampler=self._sampler)
        self._seeds = WorkerSeeds(self._loader, rank)
        self.lead = loader.num_workers * (loader.prefetch_factor or 0)
        self.signature = f"{self._sampler.length} samples, drop_last={loader.drop_last}"

    def open(self, epoch: int) -> list[str]:
        """Set the epoch's order, before `begin`; return texts that must be equal on all ranks.

        Raises ValueError if the order is not as long as the first one.
        """
        order, length = self._order(epoch), self._sampler.length
        if len(order) != length:
            raise ValueError(
                f"the order of epoch {epoch} must hold {length} indices, got {len(order)}"
            )
        self._sampler.order = order
        return [describe_order(order)]

    def begin(
        self, epoch: int, step: int, start: int, compare: Compare
    ) -> Iterator[tuple[Cut, Any]]:
        """Yield the rest of an epoch, from a step and a position in its order."""
        sampler = self._sampler
        sampler.step, sampler.start = step, start
        self._seeds.begin(epoch)
        for batch in self._loader:
            yield sampler.cuts.popleft(), batch

    def steps(self, start: int) -> int:
        """Return how many steps are left with the current global batch."""
        sampler = self._sampler
        left, total = sampler.length - start, sum(sampler.plan.at(sampler.plan.drawn))
        return left // total if sampler.drop_last else -(-left // total)


class StreamSource:
    """An iterable data set, which must yield the same samples on every rank.

    Every rank reads all of it, and keeps its share of each step.
    seed: equal on all ranks, so that their workers draw the same numbers even if the scripts' seeds
        differ.
    """

    lead = 0

    def __init__(self, loader: DataLoader[Any], plan: Plan, rank: int, seed: int) -> None:
        # Single samples: the plan makes the batches. Without a collate_fn torch would turn arrays
        # into tensors first.
        self._loader = rebuilt(loader, batch_size=None, collate_fn=identity)
        self._seeds = WorkerSeeds(self._loader, seed=seed)
        self._collate = loader.collate_fn
        self._plan = plan
        self._rank = rank
        self._drop_last = loader.drop_last
        self.signature = (
            f"a stream read by {loader.num_workers} workers, drop_last={loader.drop_last}"
        )

    def open(self, epoch: int) -> list[str]:
        """Return nothing: the stream's samples are compared when they are read."""
        return []

    def begin(
        self, epoch: int, step: int, start: int, compare: Compare
    ) -> Iterator[tuple[Cut, Any]]:
        """Yield the rest of an epoch; samples before `start` are read and dropped.

        compare: lets all ranks compare the samples that the stream begins with.
        """
        self._seeds.begin(epoch)
        samples = islice(iter(self._loader), start, None)
        block = self._block(samples, step)
        compare(columns_of(block))
        while block:
            length = start + len(block)
            for cut in cut_epoch(self._plan, step, start, length, self._drop_last):
                share = [block[place - start] for place in cut.batch(self._rank)]
                yield cut, self._collate(share)
            step, start = step + 1, length
            block = self._block(samples, step)

    def _block(self, samples: Iterator[Any], step: int) -> list[Any]:
        """Return the samples of a step, those of all ranks."""
        return list(islice(samples, sum(self._plan.at(step))))

    def steps(self, start: int) -> None:
        """Return None: the length of a stream is not known."""


Source = DatasetSource | StreamSource


def open_source(
    loader: DataLoader[Any], plan: Plan, rank: int, order: Order | None, seed: int
) -> Source:
    """Return the source for a DataLoader's data set.

    Raises ValueError if the order of the loader's sampler cannot be read, see `order_of`.
    """
    if isinstance(loader.dataset, IterableDataset):
        return StreamSource(loader, plan, rank, seed)
    return DatasetSource(loader, plan, rank, order, seed)


def is_indexed(dataset: Any) -> bool:
    """Tell whether a data set is indexed and has a length."""
    return hasattr(dataset, "__len__") and not isinstance(dataset, IterableDataset)


def order_of(loader: DataLoader[Any], length: int, seed: int) -> Order:
    """Return the order of all samples that a loader's sampler implies: sequential or shuffled.

    Raises ValueError for samplers other than torch's, for subclasses with their own `__iter__`, and
    for a sampler that does not draw every sample once.
    """
    sampler = loader.sampler
    # The method, not the class: a subclass with its own `__iter__` has another order.
    draws = type(sampler).__iter__
    if isinstance(sampler, (RandomSampler, SequentialSampler)) and len(sampler) != length:
        raise ValueError(
            f"adapt hands out each of the {length} samples once an epoch, and the "
            f"{type(sampler).__name__} draws {len(sampler)}; pass order=, a function from the "
            "epoch to its indices, equal on every rank"
        )
    if isinstance(sampler, DistributedSampler) and draws is DistributedSampler.__iter__:
        if sampler.shuffle:
            seed = sampler.seed
            return lambda epoch: shuffled(length, seed, epoch)
        return lambda epoch: range(length)
    if isinstance(sampler, RandomSampler) and draws is RandomSampler.__iter__:
        if not sampler.replacement:
            return lambda epoch: shuffled(length, seed, epoch)
    elif draws is SequentialSampler.__iter__:
        return lambda epoch: range(length)
    raise ValueError(
        "adapt divides one order of all samples over the ranks, and cannot read it from a "
        f"{type(sampler).__name__}; pass order=, a function from the epoch to the indices of all "
        "samples, equal on every rank"
    )


def rebuilt(loader: DataLoader[Any], **changed: Any) -> DataLoader[Any]:
    """Return a DataLoader with the options of another one, except those in `changed`.

    Raises ValueError for a loader that may return batches out of order.
    """
    require_in_order(loader)
    options = {
        name: getattr(loader, name)
        for name in (
            "num_workers",
            "collate_fn",
            "pin_memory",
            "timeout",
            "worker_init_fn",
            "multiprocessing_context",
            "generator",
            "prefetch_factor",
            "persistent_workers",
        )
    }
    return DataLoader(loader.dataset, **{**options, **changed})


def require_in_order(loader: DataLoader[Any]) -> None:
    """Raise ValueError for a DataLoader that may return batches out of order."""
    if not getattr(loader, "in_order", True):
        raise ValueError(
            "adapt tracks the finished samples by the order of the batches: use a DataLoader with "
            "in_order=True"
        )


class WorkerSeeds:
    """Seeds a loader's workers with a new generator for every epoch, unless the loader has one.

    Without one, a DataLoader's iteration draws from torch's generator, and the script would draw
    other numbers after resuming in the middle of an epoch.
    seed: None: the script's seed (`torch.initial_seed`) when an epoch begins.
    """

    def __init__(self, loader: DataLoader[Any], rank: int = 0, seed: int | None = None) -> None:
        self._loader = None if loader.generator else loader
        self._rank, self._seed = rank, seed

    def begin(self, epoch: int, part: int = 0) -> None:
        """Seed the loader's generator from the seed, the epoch, its part, and the rank."""
        if self._loader is None:
            return
        seed = torch.initial_seed() if self._seed is None else self._seed
        # Large primes, so that different epochs, ranks and parts get different seeds.
        seed += 1_000_003 * epoch + 7_919 * self._rank + 15_485_863 * part
        # A DataLoader draws into a tensor on the default device, which accepts only its own
        # generator.
        generator = torch.Generator(torch.empty(()).device)
        self._loader.generator = generator.manual_seed(seed % 2**63)


def identity(sample: T) -> T:
    """Return the sample unchanged; it is collated with others later."""
    return sample

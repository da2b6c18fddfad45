"""Sources of a rank's batches, which are cut by the plan from a data set or from a stream.

All ranks must read the same stream. They compare the samples that an iteration begins with:

    rank 0   (image, 3)    rank 1   (image', 3)     the same: one of the columns that tell samples
             (image, 5)             (image', 5)     apart is equal on all ranks

    rank 0   (image, 3)    rank 1   (image', 3)     unknown: the columns that are equal are so
             (image, 3)             (image', 3)     in all samples

Random augmentation may make columns differ. Where each rank reads its own part of a stream, all
columns that tell samples apart differ. The order of a data set's samples must be equal as a whole.
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

    The values are whether the column tells samples apart, and its checksum; 0 and 0 for a column
    without a checksum. uint32 [1 + 2 columns].
    """
    rows = [[checksum(part) for part in _parts(sample)] for sample in block]
    if len({len(row) for row in rows}) > 1:  # lists of unlike length, say
        rows = [[checksum(sample)] for sample in block]
    told = [len(block)]
    for column in zip(*rows, strict=True):
        known = any(column)
        # A single sample cannot show whether its column tells samples apart: it is taken to.
        told.append(known and (len(set(column)) > 1 or len(column) == 1))
        told.append(known and zlib.crc32(np.array(column, np.uint32).data))
    return np.array(told, np.uint32)


def checksum(value: Any, before: int = 0) -> int:
    """Return a checksum of tensors, arrays, numbers, strings, and mappings and lists of them.

    before: the checksum so far. Values without a checksum add nothing: objects of other classes,
        tensors that are meta, sparse, nested or quantized.
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
        # Not hash(): Python salts that of a text anew in every process.
        return zlib.crc32(repr(value).encode(), before)
    if isinstance(value, (Mapping, list, tuple)):
        for part in _parts(value):
            before = checksum(part, before)
    return before


def order_in_words(order: Sequence[Any]) -> str:
    """Return a short text for an epoch's order, which must be equal on all ranks."""
    if isinstance(order, range):  # may be too long to be read
        return repr(order)
    try:
        if isinstance(order, torch.Tensor | np.ndarray):
            indices = np.asarray(order, np.int64)
        else:
            indices = np.fromiter(order, np.int64, len(order))
        told = zlib.crc32(np.ascontiguousarray(indices).data)
    except (TypeError, ValueError, OverflowError):  # indices that are not numbers, such as names
        told = checksum(order)
    return f"an order of {len(order)} samples of checksum {told:08x}"


def _parts(value: Any) -> list[Any]:
    if isinstance(value, Mapping):  # sorted, as ranks may have inserted keys in unlike orders
        return [value[key] for key in sorted(value, key=repr)]
    return list(value) if isinstance(value, (list, tuple)) else [value]


def require_the_same(transport: Transport, own: Array) -> bool:
    """Return whether ranks have read the same samples; False where the columns do not tell.

    own: this rank's `columns_of`. The result is the same on all ranks. Raises MismatchError, on
    every rank, where the samples differ.
    """
    said = [row.view(np.uint32).tolist() for row in transport.allgather(own.view(np.uint8))]
    if len({(len(row), row[0]) for row in said}) == 1:
        by_rank = [zip(row[1::2], row[2::2], strict=True) for row in said]
        columns = [set(column) for column in zip(*by_rank, strict=True)]
        known = [column for column in columns if column != {(0, 0)}]
        agreeing = [column for column in known if len(column) == 1]
        if len(agreeing) == len(known):
            return True
        if agreeing:
            return any(tells for column in agreeing for tells, _ in column)
    sides: dict[str, list[int]] = {}
    for rank, row in zip(transport.ranks, said, strict=True):
        side = f"{row[0]} samples of checksum {zlib.crc32(np.array(row, np.uint32).data):08x}"
        sides.setdefault(side, []).append(rank)
    begins = "; ".join(f"{side} on {name_ranks(ranks)}" for side, ranks in sides.items())
    raise MismatchError(
        f"the ranks read unlike streams, which begin with {begins}. adapt reads the whole stream "
        "on every rank and keeps the rank's share: let the data set yield the same samples, in the "
        "same order, on all ranks, and none by rank; random augmentation belongs into collate_fn"
    )


Order = Callable[[int], Sequence[int]]
Compare = Callable[[Array], None]
T = TypeVar("T")


class BatchSampler(Sampler[list[int]]):
    """The indices of this rank's batches; `cuts` holds the place of each batch that was drawn.

    A rank without samples in a step gets some of the step's samples, to be weighted with zero.
    """

    def __init__(self, plan: Plan, rank: int, length: int, drop_last: bool) -> None:
        self.plan = plan
        self.rank = rank
        self.length = length
        self.drop_last = drop_last
        self.order: Sequence[int] = ()  # of the epoch
        self.step = self.start = 0  # where the next iteration begins
        self.cuts: deque[Cut] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        # An iteration that was left may have drawn more than was handed out.
        self.cuts.clear()
        for cut in cut_epoch(self.plan, self.step, self.start, self.length, self.drop_last):
            # DataLoader draws ahead for its workers: the places wait here, in the order of the
            # batches.
            self.cuts.append(cut)
            yield [self.order[place] for place in cut.batch(self.rank)]


class DatasetSource:
    """A data set with a length: DataLoader workers get the indices of this rank's share.

    lead: how many steps are cut before they are handed out: workers prefetch them.
    signature: text that must be equal on all ranks.
    """

    def __init__(
        self, loader: DataLoader[Any], plan: Plan, rank: int, order: Order | None, seed: int
    ) -> None:
        length = len(loader.dataset)  # type: ignore[arg-type]
        self._order = order or order_of(loader, length, seed)
        # By the order's length, not the data set's: order= may leave samples out.
        self._sampler = BatchSampler(plan, rank, len(self._order(0)), loader.drop_last)
        self._loader = rebuilt(loader, batch_sampler=self._sampler)
        self._seeds = WorkerSeeds(self._loader, rank)
        self.lead = loader.num_workers * (loader.prefetch_factor or 0)
        self.signature = f"{self._sampler.length} samples, drop_last={loader.drop_last}"

    def open(self, epoch: int) -> list[str]:
        """Set the epoch's order, before `begin`; return texts that must be equal on all ranks.

        Raises ValueError where the order's length is not that of the first.
        """
        order, length = self._order(epoch), self._sampler.length
        if len(order) != length:
            raise ValueError(
                f"the order of epoch {epoch} must hold {length} indices, got {len(order)}"
            )
        self._sampler.order = order
        return [order_in_words(order)]

    def begin(
        self, epoch: int, step: int, start: int, compare: Compare
    ) -> Iterator[tuple[Cut, Any]]:
        """Yield the rest of an epoch, from a step and a place in its order on."""
        sampler = self._sampler
        sampler.step, sampler.start = step, start
        self._seeds.begin(epoch)
        for batch in self._loader:
            yield sampler.cuts.popleft(), batch

    def steps(self, start: int) -> int:
        """Return how many steps are left if the global batch stays as it is."""
        sampler = self._sampler
        left, total = sampler.length - start, sum(sampler.plan.at(sampler.plan.drawn))
        return left // total if sampler.drop_last else -(-left // total)


class StreamSource:
    """An iterable data set, which must yield the same samples on every rank.

    Every rank reads all of it, and keeps its share of each step.
    seed: equal on all ranks, so that their workers draw alike; the script's seeds may differ.
    """

    lead = 0

    def __init__(self, loader: DataLoader[Any], plan: Plan, rank: int, seed: int) -> None:
        # Samples come one by one, as the plan makes the batches. Without a collate_fn torch would
        # turn arrays into tensors first.
        self._loader = rebuilt(loader, batch_size=None, collate_fn=as_it_is)
        self._seeds = WorkerSeeds(self._loader, seed=seed)
        self._collate = loader.collate_fn
        self._plan = plan
        self._rank = rank
        self._drop_last = loader.drop_last
        self.signature = (
            f"a stream read by {loader.num_workers} workers, drop_last={loader.drop_last}"
        )

    def open(self, epoch: int) -> list[str]:
        """Return nothing: the stream's samples are compared as they come."""
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
                mine = [block[place - start] for place in cut.batch(self._rank)]
                yield cut, self._collate(mine)
            step, start = step + 1, length
            block = self._block(samples, step)

    def _block(self, samples: Iterator[Any], step: int) -> list[Any]:
        """Return all ranks' samples of a step."""
        return list(islice(samples, sum(self._plan.at(step))))

    def steps(self, start: int) -> None:
        """Return None: a stream does not say when it ends."""


Source = DatasetSource | StreamSource


def open_source(
    loader: DataLoader[Any], plan: Plan, rank: int, order: Order | None, seed: int
) -> Source:
    """Return the source for a DataLoader's data set.

    Raises ValueError for a loader whose sampler has no order to divide, see `order_of`.
    """
    if isinstance(loader.dataset, IterableDataset):
        return StreamSource(loader, plan, rank, seed)
    return DatasetSource(loader, plan, rank, order, seed)


def is_indexed(dataset: Any) -> bool:
    """Tell whether a data set hands out samples by their indices, and has a length."""
    return hasattr(dataset, "__len__") and not isinstance(dataset, IterableDataset)


def order_of(loader: DataLoader[Any], length: int, seed: int) -> Order:
    """Return the order of all samples that a loader's sampler implies: in sequence, or shuffled.

    Raises ValueError for samplers other than torch's, for subclasses that draw by themselves, and
    for a sampler that does not draw every sample once.
    """
    sampler = loader.sampler
    # By the method, not the class: a subclass that draws by itself has another order.
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
    """Return a DataLoader with the options of another one, but for those that are `changed`.

    Raises ValueError for a loader whose batches may overtake each other.
    """
    require_in_order(loader)
    kept = {
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
    return DataLoader(loader.dataset, **{**kept, **changed})


def require_in_order(loader: DataLoader[Any]) -> None:
    """Raise ValueError for a DataLoader whose batches may overtake each other."""
    if not getattr(loader, "in_order", True):
        raise ValueError(
            "adapt notes which samples are done, batch by batch in their order: use a DataLoader "
            "with in_order=True"
        )


class WorkerSeeds:
    """Seeds a loader's workers by a new generator for every epoch, unless the loader has one.

    Without one, a DataLoader's iteration draws from torch's generator, and the script would draw
    other numbers after resuming an epoch in its middle.
    seed: None: the script's seed (`torch.initial_seed`) when an epoch begins.
    """

    def __init__(self, loader: DataLoader[Any], rank: int = 0, seed: int | None = None) -> None:
        self._loader = None if loader.generator else loader
        self._rank, self._seed = rank, seed

    def begin(self, epoch: int, part: int = 0) -> None:
        """Seed the loader's generator by the seed, the epoch, the part of it, and the rank."""
        if self._loader is None:
            return
        seed = torch.initial_seed() if self._seed is None else self._seed
        # Primes far apart, so that no two of epoch, rank and part give one seed.
        seed += 1_000_003 * epoch + 7_919 * self._rank + 15_485_863 * part
        # A DataLoader draws into a tensor on the default device, which takes no other generator.
        generator = torch.Generator(torch.empty(()).device)
        self._loader.generator = generator.manual_seed(seed % 2**63)


def as_it_is(sample: T) -> T:
    """Return the sample unchanged: it is collated with others later."""
    return sample

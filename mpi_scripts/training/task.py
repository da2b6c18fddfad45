"""Task: a rank's data, loss and scores, with a subclass for each kind of data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Generic, NamedTuple, TypeVar

import torch
from torch.utils.data import DataLoader

from models.data.batches import as_batch
from models.data.visits import Visits

B = TypeVar("B", bound=tuple[torch.Tensor, ...])

SYNTHETIC: Final = "synthetic"


class Source(NamedTuple):
    """Where data comes from.

    name:    an installed data set ("digits"), or the path of an .npz file.
    folder:  the folder of the published files; None: synthetic data.
    samples: number of synthetic training samples; None: as many as the published set has.
    """

    name: str = "digits"
    folder: Path | None = None
    samples: int | None = None
    seed: int = 0


class Feed(NamedTuple):
    """How a rank reads its share of the data; workers: processes that load batches."""

    rank: int
    size: int
    batch_size: int
    seed: int = 0
    workers: int = 0


class Sizes(NamedTuple):
    """A network's inputs (number of features, pixels or words) and outputs (number of classes)."""

    inputs: int
    outputs: int


class Task(ABC, Generic[B]):
    """A kind of data to train on.

    sizes: the network's; batches_per_epoch: on each rank; origin: where the data comes from.
    """

    sizes: Sizes
    batches_per_epoch: int
    origin: str

    @property
    def label(self) -> str:
        """Return the note beside every figure: empty for real data."""
        return f" ({self.origin})" if self.origin.startswith(SYNTHETIC) else ""

    @abstractmethod
    def batches(self, epoch: int, first: int) -> Iterator[B]:
        """Yield this rank's batches of an epoch, from number `first` on."""

    @abstractmethod
    def loss(self, model: torch.nn.Module, batch: B) -> torch.Tensor:
        """Return the mean loss of a batch."""

    @abstractmethod
    def count(self, model: torch.nn.Module, device: torch.device) -> list[float]:
        """Return sums over this rank's share of the test samples, for `scores`."""

    @abstractmethod
    def scores(self, totals: list[float]) -> dict[str, float]:
        """Return the scores, by the name of the measure, from the sums over all ranks."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that is carried from batch to batch; {} without any."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore this state; {}: clear it."""


class Loading(Generic[B]):
    """A rank's batches of a data set that can be visited in any order."""

    def __init__(self, data: Any, feed: Feed, *, batch_size: int | None = None) -> None:
        self.data, self.feed = data, feed
        self.visits = Visits(
            len(data),
            feed.batch_size if batch_size is None else batch_size,
            rank=feed.rank,
            size=feed.size,
            seed=feed.seed,
        )
        if not len(self.visits):
            raise ValueError(
                f"--batch-size {feed.batch_size} must not exceed the {self.visits.per_rank} of "
                f"{len(data)} training samples that each of {feed.size} ranks gets"
            )

    def __len__(self) -> int:
        return len(self.visits)

    def batches(self, epoch: int, first: int) -> Iterator[B]:
        self.visits.begin(epoch, first)
        loader: DataLoader[B] = DataLoader(
            self.data,
            batch_sampler=self.visits,
            collate_fn=as_batch,
            num_workers=self.feed.workers,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),  # does not change the training's random numbers
        )
        return iter(loader)


def moved(batch: B, device: torch.device) -> B:
    """Return a batch on a device."""
    return type(batch)(*(part.to(device, non_blocking=True) for part in batch))


def share(samples: int, feed: Feed) -> range:
    """Return the numbers of the test samples that this rank evaluates."""
    return range(feed.rank, samples, feed.size)


def parts(numbers: range, most: int) -> Iterator[range]:
    """Cut numbers into ranges of at most `most`."""
    for begin in range(0, len(numbers), most):
        yield numbers[begin : begin + most]

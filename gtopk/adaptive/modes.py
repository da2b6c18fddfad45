"""Modes: the ways to give ranks unlike batches, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

from .balanced import BalancedLoader
from .delayed.delayed import DelayedLoader
from .hogbatch.loader import HogbatchLoader
from .hogbatch.options import HogbatchOptions
from .merging.loader import MergingLoader
from .merging.options import MergingOptions
from .options import BalancedOptions, Job, Options, RoundOptions


class Adapted(Protocol):
    """What every mode gives the script in place of its DataLoader.

    num_samples: of the batch in hand.
    """

    num_samples: int

    def __iter__(self) -> Iterator[Any]:
        """Yield an epoch's batches."""

    def set_epoch(self, epoch: int) -> None:
        """Shuffle the next iteration as this epoch."""

    def drain(self) -> None:
        """Apply what is under way: before evaluation, a checkpoint, the end."""

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` goes on from."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another loader of this mode stopped."""


class Mode(NamedTuple):
    """What a mode may be told, and what opens it; whether a data set may be iterable."""

    options: type[Options]
    open: Callable[[Job[Any]], Adapted]
    takes_streams: bool = False


MODES: Final[Mapping[str, Mode]] = {
    "balanced": Mode(BalancedOptions, BalancedLoader, takes_streams=True),
    "abs": Mode(RoundOptions, DelayedLoader),
    "adaptive-sgd": Mode(MergingOptions, MergingLoader),
    "hogbatch": Mode(HogbatchOptions, HogbatchLoader),
    "adaptive-hogbatch": Mode(HogbatchOptions, partial(HogbatchLoader, adapts=True)),
}

"""The options of `adapt` that all modes share, those of "balanced" and "abs", and Job."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Generic, TypeVar

from torch.utils.data import DataLoader

from ..errors import check_choice
from ..optim.samples import whole_number
from ..runtime.world.membership import World
from .current_batch import FACTORS
from .sources import Order
from .throughput import Timer

O_co = TypeVar("O_co", bound="Options", covariant=True)


@dataclass(frozen=True)
class Options:
    """Options of every mode; equal on all ranks, except those named in `own`.

    global_batch:   samples of all ranks in a step.
    min_batch:      least samples of a rank; lowered to an equal share if that is less.
    max_batch:      most samples of this rank, to fit into its memory; at least a grain.
    grain:          sizes are multiples of it: larger => whole tiles of a GPU, coarser balance.
    lr_scaling:     how the learning rate follows the samples of a step, or of this rank's batch in
                    modes without a common step: "none", "linear", "sqrt"; "adascale" in "balanced".
    loss_reduction: "mean" or "sum": whether the script's loss is its samples' mean or sum.
    seed:           of the samples' order, unless the loader's sampler has a seed; of a stream's
                    workers.
    """

    own: ClassVar[Collection[str]] = ("max_batch",)

    global_batch: int
    min_batch: int = 8
    max_batch: int | None = None
    grain: int = 1
    lr_scaling: str = "none"
    loss_reduction: str = "mean"
    seed: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            # Types are texts here, because of `from __future__ import annotations`.
            if field.type == "int" or (field.type == "int | None" and value is not None):
                # NumPy's whole numbers become ints: ranks compare options by their repr.
                object.__setattr__(self, field.name, whole_number(field.name, value))

    def check(self) -> None:
        """Raise ValueError for an option out of its range."""
        self._require(1, "global_batch", "grain")
        self._require(0, "min_batch")
        if self.max_batch is not None and self.max_batch < self.grain:
            raise ValueError(
                f"max_batch must be at least {self.grain} (the grain), got {self.max_batch}"
            )
        check_choice("lr_scaling", self.lr_scaling, FACTORS)
        check_choice("loss_reduction", self.loss_reduction, ("mean", "sum"))

    def _require(self, least: int, *names: str) -> None:
        for name in names:
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")

    def signature(self) -> list[str]:
        """Return the options that must be equal on all ranks, as text."""
        return [f"{name}={value!r}" for name, value in vars(self).items() if name not in self.own]


@dataclass(frozen=True)
class BalancedOptions(Options):
    """Further options of mode "balanced".

    interval:       steps in a window: more => steadier, slower to follow.
    policy:         "equal_finish": a constant global batch; "goodput": also choose its size.
    noise_every:    steps between probes of the gradient noise; 0: no probes, or every 100 steps if
                    policy or lr_scaling need the noise. A probe costs a dense allreduce.
    min_global_batch, max_global_batch: the range for policy "goodput"; 0: global_batch.
    """

    interval: int = 20
    policy: str = "equal_finish"
    noise_every: int = 0
    min_global_batch: int = 0
    max_global_batch: int = 0

    def check(self) -> None:
        """Raise ValueError for an option out of its range."""
        super().check()
        self._require(1, "interval")
        self._require(0, "noise_every", "min_global_batch", "max_global_batch")
        check_choice("policy", self.policy, ("equal_finish", "goodput"))
        least, most = self.min_global_batch, self.max_global_batch
        if self.policy != "goodput":
            if least or most:
                raise ValueError(
                    f"min_global_batch and max_global_batch need policy='goodput', got "
                    f"{self.policy!r}, which keeps global_batch constant"
                )
            return
        # The given batch is the reference of the efficiency and the start of the search, so it must
        # be in the range.
        if not (least or self.global_batch) <= self.global_batch < most:
            raise ValueError(
                "policy 'goodput' needs min_global_batch <= global_batch < max_global_batch, got "
                f"{least}, {self.global_batch} and {most}"
            )
        # A larger batch means fewer steps an epoch, which learn less at the same rate.
        if self.lr_scaling == "none":
            raise ValueError(
                "policy 'goodput' changes the global batch, and the learning rate has to follow: "
                "use lr_scaling='adascale' for SGD, 'sqrt' for Adam"
            )

    def totals(self) -> range:
        """Return the global batches that may be chosen."""
        low = self.min_global_batch or self.global_batch
        high = self.max_global_batch or self.global_batch
        # Rounded up: a total below min_global_batch must not be chosen.
        return range(-(-low // self.grain) * self.grain, high + 1, self.grain)


@dataclass(frozen=True)
class RoundOptions(Options):
    """Further options of mode "abs".

    micro_batch: smaller => waits less for a round's end, less memory, more kernel launches.
    All micro-batches have this size: min_batch, max_batch and grain are refused.
    """

    micro_batch: int = 16

    def check(self) -> None:
        """Raise ValueError for an option out of its range."""
        super().check()
        self._require(1, "micro_batch")
        for field in fields(Options):
            value = getattr(self, field.name)
            if field.name in ("min_batch", "max_batch", "grain") and value != field.default:
                raise ValueError(
                    "mode 'abs' hands out micro-batches of one size: use micro_batch in place of "
                    f"{field.name}, got {field.name}={value}"
                )


@dataclass(frozen=True)
class Job(Generic[O_co]):
    """The arguments for a mode's loader.

    optimizer: a DistributedOptimizer.
    timer: measures a batch's seconds in place of the clock, in simulations of "balanced".
    """

    loader: DataLoader[Any]
    optimizer: Any
    options: O_co
    world: World
    order: Order | None = None
    timer: Timer | None = None

"""`hvd.adapt` makes a DataLoader's batches follow the ranks' speeds; MODES holds its modes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from functools import partial
from typing import Any, Final, Literal, NamedTuple, Protocol, overload

import torch
from torch.utils.data import DataLoader

from ..errors import check_choice
from ..exchange.automatic import hides_behind_backward
from ..optim.wrapped.adam_step import require_plain
from ..optim.wrapped.wrapping import Readings
from ..reduce_ops import Adasum, Average
from ..runtime.world import world
from ..runtime.world.process_sets import global_process_set
from .balanced import BalancedLoader
from .delayed_sync.delayed import DelayedLoader
from .hogbatch.loader import HogbatchLoader
from .hogbatch.options import HogbatchOptions
from .local_steps import require_not_taken
from .model_averaging.loader import MergingLoader
from .model_averaging.options import MergingOptions
from .options import BalancedOptions, Job, Options, RoundOptions
from .sources import Order, is_indexed
from .throughput import Timer


class Adapted(Protocol):
    """A loader of any mode; the script uses it in place of its DataLoader.

    num_samples: this rank's samples in the current batch.
    """

    num_samples: int

    def __iter__(self) -> Iterator[Any]:
        """Yield an epoch's batches."""

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration this epoch, with its shuffled order."""

    def drain(self) -> None:
        """Apply all pending work; call it before an evaluation, a checkpoint and the end."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which `load_state_dict` resumes."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume where another loader of this mode stopped."""


class Mode(NamedTuple):
    """A mode: its options, its loader's constructor, and whether it accepts iterable data sets."""

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


@overload
def adapt(
    loader: DataLoader[Any],
    optimizer: torch.optim.Optimizer,
    mode: Literal["balanced"] = ...,
    *,
    global_batch: int | None = None,
    order: Order | None = None,
    timer: Timer | None = None,
    **options: Any,
) -> BalancedLoader: ...


@overload
def adapt(
    loader: DataLoader[Any],
    optimizer: torch.optim.Optimizer,
    mode: Literal["abs"],
    *,
    global_batch: int | None = None,
    order: Order | None = None,
    timer: Timer | None = None,
    **options: Any,
) -> DelayedLoader: ...


@overload
def adapt(
    loader: DataLoader[Any],
    optimizer: torch.optim.Optimizer,
    mode: Literal["adaptive-sgd"],
    *,
    global_batch: int | None = None,
    order: Order | None = None,
    timer: Timer | None = None,
    **options: Any,
) -> MergingLoader: ...


@overload
def adapt(
    loader: DataLoader[Any],
    optimizer: torch.optim.Optimizer,
    mode: Literal["hogbatch", "adaptive-hogbatch"],
    *,
    global_batch: int | None = None,
    order: Order | None = None,
    timer: Timer | None = None,
    **options: Any,
) -> HogbatchLoader: ...


def adapt(
    loader: DataLoader[Any],
    optimizer: torch.optim.Optimizer,
    mode: Literal["balanced", "abs", "adaptive-sgd", "hogbatch", "adaptive-hogbatch"] = "balanced",
    *,
    global_batch: int | None = None,
    order: Order | None = None,
    timer: Timer | None = None,
    **options: Any,
) -> Adapted:
    """Return a loader to use in place of `loader`; its batches follow the ranks' speeds.

    The ranks' batches are disjoint, and together they hold every sample once an epoch, for any
    sampler of the loader. The optimizer weights each rank's gradients by its samples. Call it after
    DistributedOptimizer, on every rank, with the same arguments except a rank's own
    (`Options.own`).

    mode: "balanced": synchronous steps of one global batch, divided by speed. "abs": each rank
        computes as many micro-batches as it can while the step before is reduced; see
        `delayed_sync.rounds`. "adaptive-sgd": each rank trains its own replica on batches that it
        takes when it is free, and replicas are merged after every mega-batch; see
        `model_averaging.loader`. "hogbatch", "adaptive-hogbatch": the ranks of a node update one
        model in shared memory, each at its own pace; see `hogbatch`.
    global_batch: samples of all ranks in a step; default: the loader's batch_size times the ranks.
        In "adaptive-sgd": the sum of the ranks' first batches.
    order: maps an epoch to the indices of all samples, equal on every rank; default: the order of
        the loader's sampler, over all samples.
    timer: measures a batch's seconds in place of the clock, in simulations of "balanced"; other
        modes ignore it.
    options: min_batch=8, max_batch=None, grain=1, lr_scaling="none", loss_reduction="mean", seed=0;
        "balanced" also has interval=20, policy="equal_finish", noise_every=0, min_global_batch=0,
        max_global_batch=0; "abs" has micro_batch=16, and no min_batch, max_batch or grain: see
        `options`. "adaptive-sgd" has min_batch=0, lr_scaling="linear", algorithm="adaptive",
        mega_batch=0, batch_rule="multiplicative", merge_weights="updates", perturbation=0.0,
        merge_momentum=0.0, local_steps=8, record=False, replay=None: see `model_averaging.options`.
        The hogbatch modes have min_batch=1, lr_scaling="linear", device_class=None, sizes=None,
        alpha=2.0, beta=1.0, merge_every=None, nodes=None, lock_step=False, ranks_may_leave=False,
        audit=False: see `hogbatch.options`.
    Raises ValueError for an argument out of its range; for a loader if the mode cannot choose its
    batches or samples; for an optimizer that is already adapted in a mode other than "balanced";
    and, in such a mode, for one that has taken Adam's steps before the exchange. Raises TypeError
    for an option that the mode does not have, for a number that must be whole and is not, for a
    loader that is not a DataLoader, and for an optimizer that is not distributed. Raises
    HorovodInternalError on every rank if the ranks' arguments differ.
    """
    check_choice("mode", mode, MODES)
    # Before the check of the class: op=Adasum gives an optimizer of another class, and that error
    # would not help.
    if getattr(optimizer, "op", None) == Adasum:
        raise ValueError(
            "adapt weights an average of gradients, and op=Adasum combines what each rank's own "
            "step changed: use DistributedOptimizer(op=Average)"
        )
    if not isinstance(optimizer, Readings):
        raise TypeError(
            f"adapt needs the optimizer that DistributedOptimizer returned, got "
            f"{type(optimizer).__name__}"
        )
    if optimizer.op != Average:
        raise ValueError("adapt weights an average: use DistributedOptimizer(op=Average)")
    if optimizer.process_set is not global_process_set:
        raise ValueError("adapt divides the batches of all ranks: it takes no process_set")
    require_not_taken(optimizer)
    # A script that adapts a loader twice passes one that `adapt` has returned.
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"adapt needs a torch.utils.data.DataLoader, got {type(loader).__name__}; to adapt it "
            "again, pass the original DataLoader"
        )
    here = world.current()
    if mode != "balanced":
        # These modes step the wrapped optimizer, which cannot continue from the moments of such
        # steps.
        require_plain(optimizer.state.values(), here.rank)
        if hides_behind_backward(optimizer.step_policy.options.compression):
            raise ValueError(
                f"hide_behind_backward=True is not for mode {mode!r}, which exchanges no gradients "
                "during a step's backward pass; give density= or bytes_per_step="
            )
    if loader.batch_size is None:
        raise ValueError(
            "adapt makes the batches itself, and needs a DataLoader with a batch_size, got one "
            "with batch_size=None or its own batch_sampler; pass that sampler's order as order=, "
            "a function from the epoch to the indices of all samples, equal on every rank"
        )
    if not MODES[mode].takes_streams and not is_indexed(loader.dataset):
        raise ValueError(
            f"mode {mode!r} hands out the samples of an epoch by their indices: it needs a data "
            f"set with a length, not an IterableDataset, got {type(loader.dataset).__name__}"
        )
    names = [field.name for field in fields(MODES[mode].options)]
    # Not left to the constructor: its TypeError would not name the mode.
    if unknown := [name for name in options if name not in names]:
        raise TypeError(f"mode {mode!r} has no option {unknown[0]!r}; it has {', '.join(names)}")
    # The script's samples a step before, with one batch on each rank.
    if global_batch is None:
        global_batch = loader.batch_size * here.size
    mode_options = MODES[mode].options(global_batch, **options)
    mode_options.check()
    return MODES[mode].open(Job(loader, optimizer, mode_options, here, order, timer))

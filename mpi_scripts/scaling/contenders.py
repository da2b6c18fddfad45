"""Contenders: the methods to compare, from a computed backward pass to the update.

alone           no exchange: the baseline of the others' efficiency
ssgd            MPI's own allreduce (gloo's, under torchrun) of the whole gradient, after backward
dense           gtopk's DistributedOptimizer without compression; overlaps with backward
ddp             DistributedDataParallel over gloo; overlaps; it has as many buckets as the model
                that this one stands for would have
ddp-fp16        the same with PyTorch's hook that sends float16
ddp-powersgd    the same with PyTorch's PowerSGD hook, rank 2, in one bucket: with several, the hook
                calls gloo in a different order on each rank, which ends the job
topk-allgather, gtopk-tree, gtopk, oktopk, auto      DistributedOptimizer with that compression
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final, NamedTuple

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from gtopk.cli.bench.collectives.library import ModelledLibrary
from gtopk.cli.bench.optimizer import WHOLE_MODEL_MB, register_power
from gtopk.compression import Compression, SparseCompression
from gtopk.optim.distributed import DistributedOptimizer

from .models import Compute

ALONE: Final = "alone"
_BUCKET_MB: Final = 25  # PyTorch's default, but for a smaller first one


@dataclass(frozen=True)
class Tree(SparseCompression):
    """The published schedule, up a binary tree and down, with gtopk's merge and messages."""

    algorithm: ClassVar[str] = "gtopk-tree"


class Setting(NamedTuple):
    """The inputs of every contender.

    library: reduces dense gradients for `ssgd`; group: gloo's process group of all ranks.
    """

    compute: Compute
    density: float
    ranks: int
    library: ModelledLibrary
    group: Any


Step = Callable[[], None]


def _stepping(setting: Setting, model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step() -> None:
        optimizer.zero_grad()
        setting.compute.backward(model)
        optimizer.step()

    return step


def _plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)


def alone(setting: Setting) -> Step:
    model = setting.compute.make()
    return _stepping(setting, model, _plain(model))


def ssgd(setting: Setting) -> Step:
    """Return a step that sums all gradients as one, once backward has ended."""
    model = setting.compute.make()
    optimizer, parameters = _plain(model), list(model.parameters())
    flat = torch.empty(sum(p.numel() for p in parameters))
    views = [
        view.view_as(p)
        for view, p in zip(flat.split([p.numel() for p in parameters]), parameters, strict=True)
    ]

    def step() -> None:
        optimizer.zero_grad()
        setting.compute.backward(model)
        gradients = [p.grad for p in parameters if p.grad is not None]
        torch._foreach_copy_(views, gradients)
        setting.library.allreduce(flat.numpy())
        flat.div_(setting.ranks)
        torch._foreach_copy_(gradients, views)
        optimizer.step()

    return step


def ours(setting: Setting, compression: Callable[[float], Any]) -> Step:
    """Return a step of DistributedOptimizer."""
    model = setting.compute.make()
    optimizer = DistributedOptimizer(
        _plain(model), model.named_parameters(), compression(setting.density)
    )
    return _stepping(setting, model, optimizer)


def ddp(
    setting: Setting,
    hook: Callable[[Any, Any], None] | None = None,
    bucket_mb: float | None = None,
) -> Step:
    """Return a step of DistributedDataParallel.

    hook: registers a hook, given model and group. bucket_mb: None: PyTorch's default, scaled.
    """
    scale = setting.compute.scale
    if bucket_mb is None and scale != 1.0:
        bucket_mb = _BUCKET_MB / scale
    model = nn.parallel.DistributedDataParallel(
        setting.compute.make(), process_group=setting.group, bucket_cap_mb=bucket_mb
    )
    if hook is not None:
        hook(model, setting.group)
    return _stepping(setting, model, _plain(model))


def _halves(model: Any, group: Any) -> None:
    model.register_comm_hook(group, default_hooks.fp16_compress_hook)


class Contender(NamedTuple):
    """A way to train. ours: whether it is gtopk's; warm_up: steps until its speed is steady."""

    name: str
    ours: bool
    open: Callable[[Setting], Step]
    warm_up: int = 2


_SPARSE: Final[Mapping[str, Callable[[float], Any]]] = {
    "topk-allgather": Compression.topk,
    "gtopk-tree": Tree,
    "gtopk": Compression.gtopk,
    "oktopk": Compression.oktopk,
}
CONTENDERS: Final[Mapping[str, Contender]] = {
    each.name: each
    for each in (
        Contender(ALONE, False, alone),
        Contender("ssgd", False, ssgd, warm_up=1),
        Contender("dense", True, partial(ours, compression=lambda density: Compression.none)),
        Contender("ddp", False, ddp),
        Contender("ddp-fp16", False, partial(ddp, hook=_halves)),
        Contender(
            "ddp-powersgd", False, partial(ddp, hook=register_power, bucket_mb=WHOLE_MODEL_MB), 4
        ),
        *(Contender(name, True, partial(ours, compression=c), 4) for name, c in _SPARSE.items()),
        # If dense may be as fast, `auto` starts with five dense steps to compare with. Otherwise
        # it takes them once they are a hundredth of the time passed: timed with the rest.
        Contender(
            "auto", True, partial(ours, compression=lambda d: Compression.auto(density=d)), 9
        ),
    )
}

"""Allreduce: every rank gets what the ranks' tensors, or lists of tensors, reduce to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray

from collectives.transports import Transport

from ...compression import Compression, Compressor
from ...reductions import Adasum
from ...world.process_sets import ProcessSet, global_process_set
from .adasum import combine
from .compressing import compress
from .handles import submit, synchronize
from .reduction import Reduction, reduction_of
from .tensors import check, check_in_place, describe, describe_each, empty_like, memory_of, writer


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return the tensor reduced over the ranks (default: the average); differentiable.

    `Reduction` says what becomes of which dtype.
    """
    reduction = reduction_of(op, average, prescale_factor, postscale_factor)
    compressed, decompress = compress(compression, [tensor])
    output = _Allreduce.apply(False, name, reduction, process_set, *compressed)  # type: ignore[no-untyped-call]
    return decompress([output])[0]


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce the tensor over the ranks in place, and return it."""
    reduction = reduction_of(op, average, prescale_factor, postscale_factor)
    output: torch.Tensor = synchronize(_begin_in_place([tensor], name, reduction, process_set))
    return output


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to reduce a tensor over the ranks; return a handle for `synchronize` and `poll`."""
    reduction = reduction_of(op, average, prescale_factor, postscale_factor)
    return _begin([tensor], [empty_like(tensor)], name, reduction, process_set)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to reduce a tensor in place; leave it alone until the handle is synchronized."""
    reduction = reduction_of(op, average, prescale_factor, postscale_factor)
    return _begin_in_place([tensor], name, reduction, process_set)


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Return the tensors, each reduced over the ranks, all or none; differentiable."""
    reduction = reduction_of(op, average, prescale_factor, postscale_factor)
    compressed, decompress = compress(compression, tensors)
    return decompress(_Allreduce.apply(True, name, reduction, process_set, *compressed))  # type: ignore[no-untyped-call]


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, ...]:
    """Reduce the tensors over the ranks in place, and return them."""
    reduction = reduction_of(op, average, prescale_factor, postscale_factor)
    handle = _begin_in_place(tensors, name, reduction, process_set, group=True)
    outputs: tuple[torch.Tensor, ...] = synchronize(handle)
    return outputs


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to reduce tensors over the ranks, all or none; return one handle."""
    reduction = reduction_of(op, average, prescale_factor, postscale_factor)
    outputs = [*map(empty_like, tensors)]
    return _begin(tensors, outputs, name, reduction, process_set, group=True)


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to reduce tensors in place; leave them alone until the handle is synchronized."""
    reduction = reduction_of(op, average, prescale_factor, postscale_factor)
    return _begin_in_place(tensors, name, reduction, process_set, group=True)


def _begin(
    tensors: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    name: str | None,
    reduction: Reduction,
    process_set: ProcessSet,
    *,
    group: bool = False,
) -> int:
    """Begin to reduce a tensor, or a group; return a handle for the output, or a tuple of them."""
    size = process_set.engine.transport.size
    dtypes = [check(tensor).dtype for tensor in tensors]
    denses = [
        reduction.begin(memory_of(output, tensor), tensor.dtype, size)
        for output, tensor in zip(outputs, tensors, strict=True)
    ]
    combines = reduction.op == Adasum  # not element by element: nothing that the engine could fuse

    def work(transport: Transport, votes: list[int]) -> list[NDArray[Any]]:
        if combines:
            combine(denses, transport)
        return [
            reduction.end(dense.array, dtype, size)
            for dense, dtype in zip(denses, dtypes, strict=True)
        ]

    def finish(arrays: list[NDArray[Any]]) -> Any:
        written = tuple(
            writer(output)(array) for output, array in zip(outputs, arrays, strict=True)
        )
        return written if group else written[0]

    kind = "grouped_allreduce" if group else "allreduce"
    facts = (
        describe_each(tensors, describe, str(reduction))
        if group
        else [f"{describe(tensor)} {reduction}" for tensor in tensors]
    )
    fusion = () if combines else denses
    return submit(kind, name, process_set, facts, work, finish, fusion=fusion)


def _begin_in_place(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    reduction: Reduction,
    process_set: ProcessSet,
    *,
    group: bool = False,
) -> int:
    for tensor in tensors:
        check_in_place(tensor)
    return _begin(tensors, tensors, name, reduction, process_set, group=group)


class _Allreduce(torch.autograd.Function):
    """Differentiable allreduce; the gradient is reduced alike, and so is that one's own."""

    @staticmethod
    def forward(
        ctx: Any,
        group: bool,
        name: str | None,
        reduction: Reduction,
        process_set: ProcessSet,
        *tensors: torch.Tensor,
    ) -> Any:
        ctx.group, ctx.arguments = group, (reduction, process_set)
        outputs = [*map(empty_like, tensors)]
        return synchronize(_begin(tensors, outputs, name, *ctx.arguments, group=group))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        reduced = _Allreduce.apply(ctx.group, None, *ctx.arguments, *gradients)  # type: ignore[no-untyped-call]
        return None, None, None, None, *(reduced if ctx.group else [reduced])

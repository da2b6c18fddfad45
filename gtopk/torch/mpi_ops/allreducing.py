"""Allreduce: every rank gets the reduction of the ranks' tensors, or lists of tensors.

Tensors are sent in the forms of Horovod's compressors. Adasum combines each tensor by itself;
tensors of one dtype share messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from collectives.algorithms import adasum
from collectives.transports import Transport

from ...compression import Compression, Compressor
from ...exchange.buckets.arrays import await_copies
from ...reduce_ops import Adasum
from ...runtime.coordinator.fusion import DeferredGpuArray, Dense, Finish, scale
from ...runtime.world.process_sets import ProcessSet, global_process_set
from .reduction import Reduction, reduction_of
from .tensors import (
    accepted_by,
    check,
    check_in_place,
    describe,
    describe_each,
    empty_like,
    memory_of,
    place_flags,
    require_tensor,
    require_tensors,
    submit,
    synchronize,
    write,
)


def compress(
    compression: type[Compressor], tensors: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]]:
    """Return the compressed tensors, and the function that decompresses the reduced ones.

    Raises TypeError for a compression that is none of Horovod's kind.
    """
    # By its methods, as in Horovod: scripts bring compressors of their own.
    if not hasattr(compression, "compress"):
        raise TypeError(
            f"compression must be Compression.none, .fp16, .bf16 or a Compressor class, got "
            f"{compression!r}: top-k needs the residual that DistributedOptimizer keeps"
        )
    pairs = [compression.compress(tensor) for tensor in tensors]

    def decompress(reduced: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        contexts = (context for _, context in pairs)
        return [compression.decompress(*pair) for pair in zip(reduced, contexts, strict=True)]

    return [compressed for compressed, _ in pairs], decompress


def combine(denses: Sequence[Dense], transport: Transport) -> None:
    """Combine arrays of floats over the ranks, in their own memory."""
    # dict.fromkeys, not a set: all ranks must go through the dtypes in one order.
    for dtype in dict.fromkeys(dense.on_host.dtype for dense in denses):
        alike = [dense for dense in denses if dense.on_host.dtype == dtype]
        for dense in alike:
            # Here, not by the engine, which scales only what it fuses.
            scale(dense.on_host, dense.prescale)
        lengths = [dense.on_host.size for dense in alike]
        whole = np.concatenate([dense.on_host for dense in alike])
        # The lengths keep tensors apart: Adasum's factors are of each tensor's own dot products.
        adasum.allreduce(transport, whole, lengths)
        for dense, part in zip(alike, np.split(whole, np.cumsum(lengths)[:-1]), strict=True):
            dense.on_host[...] = part
            scale(dense.on_host, dense.postscale)


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

    `Reduction` describes the treatment of each dtype.
    """
    require_tensor(tensor, "allreduce")
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
    require_tensor(tensor, "allreduce_")
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
    require_tensor(tensor, "allreduce_async")
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
    require_tensor(tensor, "allreduce_async_")
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
    tensors = require_tensors(tensors, "grouped_allreduce")
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
    tensors = require_tensors(tensors, "grouped_allreduce_")
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
    tensors = require_tensors(tensors, "grouped_allreduce_async")
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
    tensors = require_tensors(tensors, "grouped_allreduce_async_")
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
    transport = process_set.engine.transport
    size = transport.size
    dtypes = [check(tensor).dtype for tensor in tensors]
    combines = reduction.op == Adasum  # not element by element, so the engine cannot fuse it
    on_gpu = not combines and accepted_by(tensors, transport)
    # Where possible in the outputs: reduced there, they need no copy back.
    memories = [memory_of(o, t, on_gpu) for o, t in zip(outputs, tensors, strict=True)]
    # One wait for all copies, which go on side by side.
    if not on_gpu:
        await_copies(tensors)
    denses = [
        reduction.begin(memory.elements, dtype, size)
        for memory, dtype in zip(memories, dtypes, strict=True)
    ]

    def work(transport: Transport, all_flags: list[int]) -> list[Any]:
        if combines:
            combine(denses, transport)
        if on_gpu:
            return end_on_gpu()
        return [
            reduction.end(dense.on_host, dtype, size)
            for dense, dtype in zip(denses, dtypes, strict=True)
        ]

    def end_on_gpu() -> list[torch.Tensor]:
        arrays = [dense.array for dense in denses if isinstance(dense.array, DeferredGpuArray)]
        with finished.on(tensors[0].device):
            return [
                reduction.end_on_gpu(each.tensor, dtype, size)
                for each, dtype in zip(arrays, dtypes, strict=True)
            ]

    def finish(reduced: list[Any]) -> Any:
        finished.wait(reduced)
        written = tuple(map(write, reduced, outputs, memories))
        return written if group else written[0]

    finished = Finish()
    kind = "grouped_allreduce" if group else "allreduce"
    signature = describe_each(tensors, describe, group, str(reduction))
    fusion = () if combines else denses
    flags = place_flags(on_gpu)
    return submit(kind, name, process_set, signature, work, finish, flags=flags, fusion=fusion)


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
    """Differentiable allreduce; the gradient is reduced in the same way, to any order."""

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
        # By the function itself, so that the gradient has one, too; without a name, which may be in
        # use.
        reduced = _Allreduce.apply(ctx.group, None, *ctx.arguments, *gradients)  # type: ignore[no-untyped-call]
        return None, None, None, None, *(reduced if ctx.group else [reduced])

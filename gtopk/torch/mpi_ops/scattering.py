"""Reducescatter: every rank gets its rows of the reduction of the ranks' tensors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from collectives.errors import MismatchError
from collectives.transports import Transport

from ...compression import Compression, Compressor
from ...errors import InvalidCallError
from ...exchange.buckets.arrays import flattened, to_array, to_device, view_tensor
from ...reduce_ops import NAMES, Average, Sum
from ...runtime.coordinator.fusion import DeferredGpuArray, Dense, Finish, all_on_gpu
from ...runtime.world.process_sets import ProcessSet, global_process_set, require_process_set
from .gathering import grouped_allgather
from .reduction import Reduction, compress, multiply, reduction_of
from .tensors import (
    accepted_by,
    check,
    describe,
    describe_each,
    require_tensor,
    require_tensors,
    submit,
    synchronize,
)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return this rank's rows of the average (or sum) of the ranks' tensors; differentiable.

    Rows are assigned in rank order; the first rows % size ranks get one more. Raises
    InvalidCallError for any other op.
    """
    require_tensor(tensor, "reducescatter")
    reduction = _reduction(op, prescale_factor, postscale_factor)
    compressed, decompress = compress(compression, [tensor])
    return decompress(_Reducescatter.apply(False, name, reduction, process_set, *compressed))[0]  # type: ignore[no-untyped-call]


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin to reduce the ranks' tensors and scatter the rows; return a handle."""
    require_tensor(tensor, "reducescatter_async")
    reduction = _reduction(op, prescale_factor, postscale_factor)
    return _begin([tensor], name, reduction, process_set)


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Run `reducescatter` on each tensor, all of them or none; differentiable."""
    tensors = require_tensors(tensors, "grouped_reducescatter")
    reduction = _reduction(op, prescale_factor, postscale_factor)
    compressed, decompress = compress(compression, tensors)
    return decompress(_Reducescatter.apply(True, name, reduction, process_set, *compressed))  # type: ignore[no-untyped-call]


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin to reduce the ranks' lists and scatter the rows of each tensor; return one handle."""
    tensors = require_tensors(tensors, "grouped_reducescatter_async")
    reduction = _reduction(op, prescale_factor, postscale_factor)
    return _begin(tensors, name, reduction, process_set, group=True)


def _reduction(op: int, prescale_factor: float, postscale_factor: float) -> Reduction:
    if op not in (Average, Sum):
        raise InvalidCallError(f"reducescatter takes op=Average or op=Sum, got {NAMES.get(op, op)}")
    return reduction_of(op, None, prescale_factor, postscale_factor)


def _begin(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    reduction: Reduction,
    process_set: ProcessSet,
    *,
    group: bool = False,
) -> int:
    transport = require_process_set(process_set).engine.transport
    rank, size = transport.rank, transport.size
    scalar = any(check(tensor).dim() == 0 for tensor in tensors)
    likes = [tensor.detach() for tensor in tensors]
    on_gpu = not scalar and accepted_by(tensors, transport)
    # Copies: the reduction works in place, and must not change the script's tensor.
    memories: list[Any] = [
        flattened(tensor).clone() if on_gpu else to_array(tensor) for tensor in tensors
    ]
    denses = [
        reduction.begin(memory, tensor.dtype, size)
        for memory, tensor in zip(memories, tensors, strict=True)
    ]
    finished = Finish()

    def work(transport: Transport, all_flags: list[int]) -> list[Any]:
        if scalar:
            raise MismatchError(
                "reducescatter needs tensors with at least one dimension, got a scalar"
            )
        # Split between rows: a rank's part is a tensor with the same row shape.
        bounds = [
            [row * math.prod(like.shape[1:]) for row in _first_rows(like, size)] for like in likes
        ]
        if not on_gpu:
            return scatter(bounds, [dense.on_host for dense in denses], transport)
        deferred = [dense.array for dense in denses if isinstance(dense.array, DeferredGpuArray)]
        with finished.on(likes[0].device, [each.ready for each in deferred]):
            if all_on_gpu(all_flags):
                return scatter(bounds, [each.tensor for each in deferred], transport)
            return scatter(bounds, [each.on_host() for each in deferred], transport)

    def scatter(bounds: list[list[int]], arrays: list[Any], transport: Transport) -> list[Any]:
        parts = list(arrays)
        # One message for each dtype and reduction, not one for each tensor.
        kinds = [
            (array.dtype, dense.reduction) for array, dense in zip(arrays, denses, strict=True)
        ]
        # dict.fromkeys, not a set: all ranks must visit the kinds in the same order.
        for kind in dict.fromkeys(kinds):
            alike = [n for n, other in enumerate(kinds) if other == kind]
            reduced = _reduce_scatter(
                [arrays[n] for n in alike],
                [denses[n] for n in alike],
                [bounds[n] for n in alike],
                transport,
            )
            for n, part in zip(alike, reduced, strict=True):
                parts[n] = reduction.end(part, likes[n].dtype, size)
        return parts

    def finish(parts: list[Any]) -> Any:
        finished.wait(parts)
        outputs = []
        for like, part in zip(likes, parts, strict=True):
            begin, end = _first_rows(like, size)[rank : rank + 2]
            tensor = part if isinstance(part, torch.Tensor) else view_tensor(part)
            shape = [end - begin, *like.shape[1:]]
            # Small integers were summed in a wider dtype: see `Reduction`.
            outputs.append(to_device(tensor, like.device).to(like.dtype).reshape(shape))
        return tuple(outputs) if group else outputs[0]

    kind = "grouped_reducescatter" if group else "reducescatter"
    signature = describe_each(tensors, describe, group, str(reduction))
    return submit(kind, name, process_set, signature, work, finish, on_gpu=on_gpu)


def _first_rows(tensor: torch.Tensor, size: int) -> list[int]:
    """Return the index of each rank's first row, then the end of the last rank's rows."""
    each, more = divmod(len(tensor), size)
    return [rank * each + min(rank, more) for rank in range(size + 1)]


def _reduce_scatter(
    arrays: Sequence[Any],
    denses: Sequence[Dense],
    bounds: Sequence[Sequence[int]],
    transport: Transport,
) -> list[Any]:
    """Reduce arrays of one kind in a single message, and return this rank's part of each.

    arrays: the elements, on the host or on a GPU; denses: their reductions.

    Example: three arrays a, b, c on two ranks. Rank 0 gets the first half of the message:

        a0 b0 c0 | a1 b1 c1
    """
    join: Any = torch.cat if isinstance(arrays[0], torch.Tensor) else np.concatenate
    for array, dense in zip(arrays, denses, strict=True):
        multiply(array, dense.prescale)
    parts = [
        [array[ends[rank] : ends[rank + 1]] for array, ends in zip(arrays, bounds, strict=True)]
        for rank in range(transport.size)
    ]
    # Ordered by rank, then by tensor, so that each rank's part is contiguous.
    whole = join([part for of_a_rank in parts for part in of_a_rank])
    sizes = [sum(map(len, of_a_rank)) for of_a_rank in parts]
    ends = list(itertools.accumulate(sizes, initial=0))
    transport.reduce_scatter(whole, ends, denses[0].reduction)
    # One more than the parts: the last is the end of this rank's range.
    begins = itertools.accumulate(map(len, parts[transport.rank]), initial=ends[transport.rank])
    own = [
        whole[begin : begin + len(part)]
        for begin, part in zip(begins, parts[transport.rank], strict=False)
    ]
    # Scale only this rank's part; the others scale theirs.
    for dense, part in zip(denses, own, strict=True):
        multiply(part, dense.postscale)
    return own


class _Reducescatter(torch.autograd.Function):
    """Differentiable reducescatter; the backward pass gathers the gradients of all rows.

    As in Horovod, the gradients are averaged for op=Average; for op=Sum they are `size` times the
    average.
    """

    @staticmethod
    def forward(
        ctx: Any,
        group: bool,
        name: str | None,
        reduction: Reduction,
        process_set: ProcessSet,
        *tensors: torch.Tensor,
    ) -> Any:
        ctx.reduction, ctx.process_set = reduction, process_set
        return synchronize(_begin(tensors, name, reduction, process_set, group=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        reduction, process_set = ctx.reduction, ctx.process_set
        factor = reduction.prescale_factor * reduction.postscale_factor
        if reduction.op == Sum:
            factor *= process_set.size()
        scaled = [gradient * factor for gradient in gradients]
        return None, None, None, None, *grouped_allgather(scaled, process_set=process_set)

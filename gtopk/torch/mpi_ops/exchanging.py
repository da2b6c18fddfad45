"""Alltoall: every rank sends each rank some of its rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from collectives.errors import MismatchError
from collectives.transports import Transport

from ...exchange.buckets.arrays import as_bytes
from ...runtime.coordinator.fusion import DeferredGpuArray, Finish, all_on_gpu
from ...runtime.world.process_sets import ProcessSet, global_process_set
from .tensors import (
    accepted_by,
    check,
    describe_rows,
    from_bytes,
    place_flags,
    require_tensor,
    row_bytes,
    submit,
    synchronize,
    view_bytes,
)


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return the rows that the ranks send to this one, in rank order; differentiable.

    splits: how many rows go to each rank, int32; None: equally many. Rows beyond them are not sent.
    With splits, returns a pair: the rows, and how many of them each rank sent, int32 [size].
    Raises ValueError for splits that do not fit.
    """
    require_tensor(tensor, "alltoall")
    output, received_splits = _Alltoall.apply(tensor, splits, name, process_set)  # type: ignore[no-untyped-call]
    return output if splits is None else (output, received_splits)


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to send each rank its rows; the handle's output is the pair that `alltoall` returns."""
    require_tensor(tensor, "alltoall_async")
    transport = process_set.engine.transport
    size = transport.size
    check(tensor)
    scalar = tensor.dim() == 0
    sizes = [0] * size if scalar else _splits(tensor, splits, size)
    like = tensor.detach()
    # A row without elements travels as a byte: the receiver counts rows by their bytes.
    bytes_of_a_row = row_bytes(tensor) or 1
    ends = [end * bytes_of_a_row for end in itertools.accumulate(sizes, initial=0)]
    # Rows without elements have no memory for NCCL to send.
    on_gpu = not scalar and row_bytes(tensor) > 0 and accepted_by([tensor], transport)
    mine, content = None, np.zeros(sum(sizes), np.uint8)
    if on_gpu:
        mine = DeferredGpuArray.now(as_bytes(tensor))
    elif row_bytes(tensor):
        # A copy: the script may change the tensor before the operation is run.
        content = np.array(view_bytes(tensor))
    finished = Finish()

    def work(transport: Transport, all_flags: list[int]) -> tuple[Any, list[int]]:
        if scalar:
            raise MismatchError("alltoall needs a tensor with at least one dimension, got a scalar")
        if mine is None:
            return transport.alltoall(content, ends)
        with finished.on(like.device, [mine.made]):
            if all_on_gpu(all_flags):
                return transport.alltoall(mine.tensor, ends)  # type: ignore[arg-type]
            return transport.alltoall(mine.bytes_on_host(), ends)

    def finish(received: tuple[Any, list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        elements, bounds = received
        finished.wait([elements])
        rows = [(end - begin) // bytes_of_a_row for begin, end in itertools.pairwise(bounds)]
        shape = [sum(rows), *like.shape[1:]]
        if isinstance(elements, torch.Tensor):
            output = elements.view(like.dtype).reshape(shape)
        else:
            output = from_bytes(elements[: sum(rows) * row_bytes(like)], like, shape)
        return output, torch.tensor(rows, dtype=torch.int32, device="cpu")

    signature, flags = [describe_rows(tensor)], place_flags(on_gpu)
    return submit("alltoall", name, process_set, signature, work, finish, flags=flags)


def _splits(
    tensor: torch.Tensor, splits: torch.Tensor | Sequence[int] | None, size: int
) -> list[int]:
    """Return how many rows go to each rank."""
    rows = len(tensor)
    if splits is None:
        if rows % size:
            raise ValueError(
                f"alltoall without splits needs as many rows for each of the {size} ranks, got "
                f"{rows} rows; pass splits"
            )
        return [rows // size] * size
    if not isinstance(splits, torch.Tensor):
        splits = torch.tensor(splits, dtype=torch.int32, device="cpu")
    if splits.dtype != torch.int32:
        raise ValueError(f"splits must hold 32-bit integers (torch.int32), got {splits.dtype}")
    sizes: list[int] = splits.tolist()
    if splits.dim() != 1 or len(sizes) != size:
        raise ValueError(f"splits must have one entry for each of the {size} ranks, got {sizes}")
    if min(sizes) < 0 or sum(sizes) > rows:
        raise ValueError(
            f"splits must be no less than 0, and their sum no more than the {rows} rows of the "
            f"tensor, got {sizes}"
        )
    return sizes


class _Alltoall(torch.autograd.Function):
    """Differentiable alltoall; the gradient of each row goes back to the rank that sent it."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        splits: torch.Tensor | Sequence[int] | None,
        name: str | None,
        process_set: ProcessSet,
    ) -> Any:
        output, received_splits = synchronize(alltoall_async(tensor, splits, name, process_set))
        ctx.arguments = received_splits, process_set
        ctx.shape = tensor.shape
        # Integers have no gradient.
        ctx.mark_non_differentiable(received_splits)
        return output, received_splits

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        received_splits, process_set = ctx.arguments
        # Back as it came: each rank sends as many rows as it got from there.
        returned, _ = alltoall(gradients[0], received_splits, process_set=process_set)
        stayed = returned.new_zeros([ctx.shape[0] - len(returned), *ctx.shape[1:]])  # has none
        return torch.cat([returned, stayed]), None, None, None

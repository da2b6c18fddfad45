"""Allgather, alltoall and sparse allreduce.

Allgather gives every rank all rows of the ranks' tensors. For n tensors a rank sends:

    rows             elements
    i64 [n]          of the first tensor, of the second, ...

Alltoall gives every rank the rows that the ranks address to it. Sparse allreduce concatenates the
entries of all ranks' sparse tensors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from collectives.errors import MismatchError
from collectives.transports import Transport

from ...exchange.buckets.arrays import as_bytes, flattened
from ...reduce_ops import NAMES, Average, Sum
from ...runtime.coordinator.fusion import DeferredGpuArray, Finish, all_on_gpu
from ...runtime.world.process_sets import ProcessSet, global_process_set, require_process_set
from .reduction import grouped_allreduce
from .tensors import (
    accepted_by,
    check,
    describe_each,
    describe_rows,
    from_bytes,
    require_tensor,
    require_tensors,
    row_bytes,
    submit,
    synchronize,
    view_bytes,
)


def allgather(
    tensor: torch.Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return the ranks' tensors concatenated along dimension 0; differentiable.

    The ranks' sizes in dimension 0 may differ.
    """
    require_tensor(tensor, "allgather")
    outputs: tuple[torch.Tensor] = _Allgather.apply(False, name, process_set, tensor)  # type: ignore[no-untyped-call]
    return outputs[0]


def allgather_async(
    tensor: torch.Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to concatenate the ranks' tensors along dimension 0; return a handle."""
    require_tensor(tensor, "allgather_async")
    return begin_allgather([tensor], name, process_set, lambda gathered: gathered[0].rows)


def grouped_allgather(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, ...]:
    """Gather each tensor as `allgather` does, all of them or none; differentiable."""
    tensors = require_tensors(tensors, "grouped_allgather")
    return tuple(_Allgather.apply(True, name, process_set, *tensors))  # type: ignore[no-untyped-call]


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to gather each tensor, all of them or none; return one handle."""
    tensors = require_tensors(tensors, "grouped_allgather_async")
    return begin_allgather(
        tensors, name, process_set, lambda gathered: tuple(g.rows for g in gathered), group=True
    )


class Gathered(NamedTuple):
    """The rows of all ranks, and the index of this rank's first row."""

    rows: torch.Tensor
    begin: int


def begin_allgather(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    process_set: ProcessSet,
    finish: Callable[[list[Gathered]], Any],
    *,
    group: bool = False,
    signature: Sequence[str] = (),
) -> int:
    """Begin to gather tensors; return a handle for the result of `finish`.

    signature: additional texts that must be equal on all ranks.
    """
    transport = require_process_set(process_set).engine.transport
    rank = transport.rank
    scalar = any(check(tensor).dim() == 0 for tensor in tensors)
    # Detached: the operation must not keep the script's graph alive.
    likes = [tensor.detach() for tensor in tensors]
    # A scalar fails in the operation: raising here would leave the other ranks waiting.
    row_counts = np.array([0 if scalar else len(tensor) for tensor in tensors], np.int64)
    on_gpu = not scalar and accepted_by(tensors, transport)
    deferred = (
        [DeferredGpuArray.now(flattened(tensor).contiguous()) for tensor in tensors]
        if on_gpu
        else []
    )
    content = [] if on_gpu else [*map(view_bytes, tensors)]
    message = np.concatenate([row_counts.view(np.uint8), *content])
    finished = Finish()

    def work(transport: Transport, all_flags: list[int]) -> list[tuple[Any, list[int]]]:
        if scalar:
            raise MismatchError("allgather needs tensors with at least one dimension, got a scalar")
        if not on_gpu:
            return gather(transport, message)
        with finished.on(likes[0].device, [each.ready for each in deferred]):
            if all_on_gpu(all_flags):
                return gather_on_gpu(transport)
            own = [each.bytes_on_host() for each in deferred]
            # All ranks must run the same operation: one rank without a GPU makes all use the host.
            return gather(transport, np.concatenate([message, *own]))

    def gather(transport: Transport, message: NDArray[np.uint8]) -> list[tuple[Any, list[int]]]:
        messages = transport.allgather(message)
        counts = [each[: row_counts.nbytes].view(np.int64) for each in messages]
        begins = [row_counts.nbytes] * len(messages)
        gathered = []
        for number, like in enumerate(likes):
            ends = [
                begin + int(count[number]) * row_bytes(like)
                for begin, count in zip(begins, counts, strict=True)
            ]
            parts = [m[a:b] for m, a, b in zip(messages, begins, ends, strict=True)]
            rows = [int(count[number]) for count in counts]
            gathered.append((np.concatenate(parts), rows))
            begins = ends
        return gathered

    def gather_on_gpu(transport: Transport) -> list[tuple[Any, list[int]]]:
        counts = [m.view(np.int64) for m in transport.allgather(row_counts.view(np.uint8))]
        gathered = []
        for number, (like, own) in enumerate(zip(likes, deferred, strict=True)):
            rows = [int(count[number]) for count in counts]
            row_elements = math.prod(like.shape[1:])
            bounds = [end * row_elements for end in itertools.accumulate(rows, initial=0)]
            # One buffer for all rows, with this rank's rows in position: NCCL gathers into it
            # without a copy.
            whole = own.tensor.new_empty(bounds[-1])
            whole[bounds[rank] : bounds[rank + 1]] = own.tensor
            transport.allgather_into(whole, bounds)  # type: ignore[arg-type]
            gathered.append((whole, rows))
        return gathered

    def make_tensors(gathered: list[tuple[Any, list[int]]]) -> Any:
        finished.wait(elements for elements, _ in gathered)
        return finish(
            [
                Gathered(_shaped(elements, like, sum(rows)), sum(rows[:rank]))
                for like, (elements, rows) in zip(likes, gathered, strict=True)
            ]
        )

    kind = "grouped_allgather" if group else "allgather"
    own = describe_each(tensors, describe_rows, group)
    signature = [*signature, *own]
    return submit(kind, name, process_set, signature, work, make_tensors, on_gpu=on_gpu)


def _shaped(elements: Any, like: torch.Tensor, rows: int) -> torch.Tensor:
    """Return gathered elements as a tensor like `like`, with `rows` rows."""
    shape = [rows, *like.shape[1:]]
    if isinstance(elements, torch.Tensor):
        return elements.to(like.dtype).reshape(shape)
    return from_bytes(elements, like, shape)


class _Allgather(torch.autograd.Function):
    """Differentiable allgather; the gradient is this rank's rows of the averaged gradients."""

    @staticmethod
    def forward(
        ctx: Any, group: bool, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor
    ) -> Any:
        gathered = synchronize(begin_allgather(tensors, name, process_set, list, group=group))
        ctx.process_set = process_set
        # Positions are enough, without the tensors: the gradients are slices of the whole.
        ctx.places = [
            (each.begin, len(tensor)) for each, tensor in zip(gathered, tensors, strict=True)
        ]
        return tuple(each.rows for each in gathered)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        # Averaged, not summed, as in Horovod: the ranks' losses are averaged.
        reduced = grouped_allreduce(gradients, op=Average, process_set=ctx.process_set)
        own = [
            gradient.narrow(0, *place) for gradient, place in zip(reduced, ctx.places, strict=True)
        ]
        return None, None, None, *own


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str,
    op: int,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], torch.Tensor]:
    """Begin to add a sparse COO tensor over the ranks; return a function that waits for the result.

    The result is not coalesced: it keeps one entry for each rank that has one at an index. Raises
    ValueError for a dense tensor, and for any op but Average and Sum.
    """
    require_tensor(tensor, "sparse_allreduce_async", sparse=True)
    if op not in (Average, Sum):
        raise ValueError(f"sparse tensors take op=Average or op=Sum, got {NAMES.get(op, op)}")
    if tensor.layout != torch.sparse_coo:
        raise ValueError(f"a sparse COO tensor is needed, got one of layout {tensor.layout}")
    # Checked before the indices are sent: an error afterwards would leave them in flight.
    check(tensor)
    shape = tensor.shape
    signature = [f"{tensor.dtype} {list(shape)}"]
    size = require_process_set(process_set).engine.transport.size
    # No need to coalesce here: duplicates are added when the result is used.
    indices, values = tensor._indices().t(), tensor._values()
    in_flight_indices, in_flight_values = (
        begin_allgather(
            [part], f"{name}.{what}", process_set, lambda g: g[0].rows, signature=signature
        )
        for what, part in (("indices", indices), ("values", values))
    )

    def finish() -> torch.Tensor:
        try:
            indices = synchronize(in_flight_indices)
        finally:  # leave none in flight
            values = synchronize(in_flight_values)
        if op == Average:
            values = (values / size).to(values.dtype)
        # The indices were valid on their ranks; checking them would copy them from the GPU.
        return torch.sparse_coo_tensor(
            indices.t(), values, shape, device=values.device, check_invariants=False
        )

    return finish


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return the rows that the ranks send to this one, in rank order; differentiable.

    splits: the number of rows for each rank, int32 [size]; None for equal numbers. Rows beyond the
        sum of the splits are not sent.
    With splits, returns a pair: the rows, and the number of rows from each rank, int32 [size].
    Raises ValueError for invalid splits.
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
    transport = require_process_set(process_set).engine.transport
    size = transport.size
    check(tensor)
    scalar = tensor.dim() == 0
    sizes = [0] * size if scalar else _splits(tensor, splits, size)
    like = tensor.detach()
    # Send a row without elements as one byte: the receiver derives the number of rows from bytes.
    bytes_of_a_row = row_bytes(tensor) or 1
    ends = [end * bytes_of_a_row for end in itertools.accumulate(sizes, initial=0)]
    # Rows without elements have no memory for NCCL to send.
    on_gpu = not scalar and row_bytes(tensor) > 0 and accepted_by([tensor], transport)
    deferred, content = None, np.zeros(sum(sizes), np.uint8)
    if on_gpu:
        deferred = DeferredGpuArray.now(as_bytes(tensor))
    elif row_bytes(tensor):
        # A copy: the script may change the tensor before the operation runs.
        content = np.array(view_bytes(tensor))
    finished = Finish()

    def work(transport: Transport, all_flags: list[int]) -> tuple[Any, list[int]]:
        if scalar:
            raise MismatchError("alltoall needs a tensor with at least one dimension, got a scalar")
        if deferred is None:
            return transport.alltoall(content, ends)
        with finished.on(like.device, [deferred.ready]):
            if all_on_gpu(all_flags):
                return transport.alltoall(deferred.tensor, ends)  # type: ignore[arg-type]
            return transport.alltoall(deferred.bytes_on_host(), ends)

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

    signature = [describe_rows(tensor)]
    return submit("alltoall", name, process_set, signature, work, finish, on_gpu=on_gpu)


def _splits(
    tensor: torch.Tensor, splits: torch.Tensor | Sequence[int] | None, size: int
) -> list[int]:
    """Return the number of rows for each rank."""
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
        # The reverse exchange: send each rank as many rows as came from it.
        returned, _ = alltoall(gradients[0], received_splits, process_set=process_set)
        unsent = returned.new_zeros([ctx.shape[0] - len(returned), *ctx.shape[1:]])  # rows not sent
        return torch.cat([returned, unsent]), None, None, None

"""Allgather: every rank gets the rows of the ranks' tensors, or lists of tensors.

What a rank sends, for a list of n tensors:

    rows             elements
    i64 [n]          of the first tensor, of the second, ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from collectives.errors import MismatchError
from collectives.transports import Transport

from ...reductions import Average
from ...world.process_sets import ProcessSet, global_process_set
from .allreducing import grouped_allreduce
from .handles import submit, synchronize
from .tensors import check, describe_each, describe_rows, from_bytes, row_bytes, view_bytes


def allgather(
    tensor: torch.Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return the ranks' tensors concatenated along dimension 0 (it may differ); differentiable."""
    outputs: tuple[torch.Tensor] = _Allgather.apply(False, name, process_set, tensor)  # type: ignore[no-untyped-call]
    return outputs[0]


def allgather_async(
    tensor: torch.Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to concatenate the ranks' tensors along dimension 0; return a handle."""
    return begin_allgather([tensor], name, process_set, lambda gathered: gathered[0].rows)


def grouped_allgather(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, ...]:
    """Return what `allgather` would of each of the tensors, all or none; differentiable."""
    return tuple(_Allgather.apply(True, name, process_set, *tensors))  # type: ignore[no-untyped-call]


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to concatenate the ranks' lists, tensor by tensor; return one handle."""

    def rows(gathered: list[Gathered]) -> tuple[torch.Tensor, ...]:
        return tuple(each.rows for each in gathered)

    return begin_allgather(tensors, name, process_set, rows, group=True)


class Gathered(NamedTuple):
    """The rows of all ranks, and at which of them this rank's own begin."""

    rows: torch.Tensor
    begin: int


def begin_allgather(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    process_set: ProcessSet,
    finish: Callable[[list[Gathered]], Any],
    *,
    group: bool = False,
    facts: Sequence[str] = (),
) -> int:
    """Begin to gather tensors; return a handle for what `finish` makes of them.

    facts: what else must be equal on all ranks.
    """
    rank = process_set.engine.transport.rank
    scalar = any(check(tensor).dim() == 0 for tensor in tensors)
    likes = [tensor.detach() for tensor in tensors]
    row_counts = np.array([0 if scalar else len(tensor) for tensor in tensors], np.int64)
    message = np.concatenate([row_counts.view(np.uint8), *map(view_bytes, tensors)])

    def work(transport: Transport, votes: list[int]) -> list[tuple[NDArray[np.uint8], list[int]]]:
        if scalar:
            raise MismatchError("allgather needs tensors with at least one dimension, got a scalar")
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

    def make_tensors(gathered: list[tuple[NDArray[np.uint8], list[int]]]) -> Any:
        return finish(
            [
                Gathered(from_bytes(elements, like, [sum(rows), *like.shape[1:]]), sum(rows[:rank]))
                for like, (elements, rows) in zip(likes, gathered, strict=True)
            ]
        )

    kind = "grouped_allgather" if group else "allgather"
    own = describe_each(tensors, describe_rows) if group else [*map(describe_rows, tensors)]
    return submit(kind, name, process_set, [*facts, *own], work, make_tensors)


class _Allgather(torch.autograd.Function):
    """Differentiable allgather; the gradient is averaged, and this rank's rows cut out."""

    @staticmethod
    def forward(
        ctx: Any, group: bool, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor
    ) -> Any:
        gathered = synchronize(begin_allgather(tensors, name, process_set, list, group=group))
        ctx.process_set = process_set
        ctx.places = [
            (each.begin, len(tensor)) for each, tensor in zip(gathered, tensors, strict=True)
        ]
        return tuple(each.rows for each in gathered)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        reduced = grouped_allreduce(gradients, op=Average, process_set=ctx.process_set)
        own = [
            gradient.narrow(0, *place) for gradient, place in zip(reduced, ctx.places, strict=True)
        ]
        return None, None, None, *own

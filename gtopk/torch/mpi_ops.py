"""Horovod's collectives on tensors: blocking, asynchronous and in place.

Operations are matched across ranks by name, and checked by dtype and shape before data moves. Names
are optional: without one, an operation is named by a counter.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from collectives.transports import Transport

from .. import world
from ..arrays import from_array, lies_as_array, to_array, view_array
from ..compression import Compression, Compressor
from ..engine import Operation
from ..fusion import Dense, scale
from ..reductions import NAMES, Adasum, Average, Max, Min, Product, Sum
from ..world import init, is_initialized, shutdown

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "cross_rank",
    "cross_size",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "poll",
    "rank",
    "shutdown",
    "size",
    "synchronize",
]

_REDUCTIONS: Final = {Average: "sum", Sum: "sum", Min: "min", Max: "max", Product: "product"}

_handles: dict[int, tuple[Operation, Callable[[Any], torch.Tensor]]] = {}
_next_handle = itertools.count(1)


def size() -> int:
    """Return the number of ranks."""
    return world.current().size


def rank() -> int:
    """Return this process's rank."""
    return world.current().rank


def local_size() -> int:
    """Return the number of ranks on this host."""
    return world.current().local_size


def local_rank() -> int:
    """Return this rank's index on its host."""
    return world.current().local_rank


def cross_size() -> int:
    """Return the number of hosts that have a rank with this local rank."""
    return world.current().cross_size


def cross_rank() -> int:
    """Return the index of this host among them."""
    return world.current().cross_rank


def mpi_enabled() -> bool:
    """Tell whether the ranks are joined by MPI now."""
    return world.current().transport.name == "mpi"


def mpi_built() -> bool:
    """Tell whether MPI can be used here."""
    try:
        import mpi4py.MPI  # noqa: F401 - loads the MPI library
    except (ImportError, RuntimeError):
        return False
    return True


def _submit(
    kind: str,
    name: str | None,
    facts: str,
    work: Callable[[Transport, list[int]], Any],
    finish: Callable[[Any], torch.Tensor],
    vote: int = 0,
    fusion: Sequence[Dense] = (),
) -> int:
    """Submit an operation and return its handle."""
    here = world.current()
    full_name = f"{kind}.{name or f'noname.{next(here.unnamed)}'}"
    operation = here.engine.submit(full_name, [facts], work, vote, fusion=fusion)
    handle = next(_next_handle)
    _handles[handle] = operation, finish
    return handle


def synchronize(handle: int) -> Any:
    """Wait for an asynchronous operation and return its output; None for an unknown handle.

    Raises HorovodInternalError when the ranks disagreed or one is gone.
    """
    if handle not in _handles:
        return None
    operation, finish = _handles.pop(handle)
    return finish(operation.wait())


def poll(handle: int) -> bool:
    """Tell whether `synchronize` would return at once."""
    return handle not in _handles or _handles[handle][0].done


def _checked(tensor: torch.Tensor) -> torch.Tensor:
    is_float8 = tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1
    if tensor.layout != torch.strided or tensor.dtype.is_complex or is_float8:
        raise ValueError(f"Tensor type {tensor.type()} is not supported.")
    return tensor


def _checked_in_place(tensor: torch.Tensor) -> torch.Tensor:
    if not _checked(tensor).is_contiguous():
        raise ValueError("Tensor is required to be contiguous.")
    return tensor


def _writer(output: torch.Tensor) -> Callable[[Any], torch.Tensor]:
    """Return the function that writes a reduced array into `output`, and returns it."""

    def write(array: NDArray[Any]) -> torch.Tensor:
        with torch.no_grad():
            return output.copy_(from_array(array, output))

    return write


def _reduction(op: int | None, average: bool | None) -> int:
    """Return the reduction that Horovod's two arguments for it mean."""
    if op is not None:
        if average is not None:
            raise ValueError("the op parameter supersedes average; please provide only one of them")
        if op == Adasum:
            raise ValueError("op=Adasum is not available; use Average or Sum")
        if op not in _REDUCTIONS:
            raise ValueError(f"op must be one of {', '.join(NAMES.values())}, got {op!r}")
        return op
    if average is None:
        return Average
    warnings.warn(
        "parameter `average` has been replaced by `op`: pass op=Average or op=Sum",
        DeprecationWarning,
        stacklevel=3,
    )
    return Average if average else Sum


def _allreduce(
    tensor: torch.Tensor,
    output: torch.Tensor,
    name: str | None,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
) -> int:
    ranks = size()
    is_float = _checked(tensor).dtype.is_floating_point
    in_place = lies_as_array(output)
    if in_place and output is not tensor:
        output.copy_(tensor.detach())
    array = view_array(output) if in_place else to_array(tensor)
    # A sum of float16 overflows early: an average is scaled before it, not after.
    early = op == Average and array.dtype == np.float16
    late = op == Average and is_float and not early
    dense = Dense(
        array,
        _REDUCTIONS[op],
        prescale_factor / ranks if early else prescale_factor,
        (postscale_factor / ranks if late else postscale_factor) if is_float else 1.0,
    )

    def work(transport: Transport, votes: list[int]) -> NDArray[Any]:
        if not is_float:
            if op == Average:
                array[...] = np.sign(array) * (np.abs(array) // ranks)
            scale(array, postscale_factor)
        return array

    facts = (
        f"{tensor.dtype} {list(tensor.shape)} op={NAMES[op]} "
        f"prescale_factor={float(prescale_factor)} postscale_factor={float(postscale_factor)}"
    )
    finish = (lambda _: output) if in_place else _writer(output)
    return _submit("allreduce", name, facts, work, finish, fusion=[dense])


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin to reduce a tensor over all ranks; return a handle for `synchronize` and `poll`."""
    output = torch.empty_like(tensor, requires_grad=False)
    reduction = _reduction(op, average)
    return _allreduce(tensor, output, name, reduction, prescale_factor, postscale_factor)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin to reduce a tensor in place; leave it alone until the handle is synchronized."""
    reduction = _reduction(op, average)
    return _allreduce(
        tensor, _checked_in_place(tensor), name, reduction, prescale_factor, postscale_factor
    )


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return the tensor reduced over all ranks (default: the average); differentiable.

    Integers are averaged truncating toward zero; float16 is added in float32.
    """
    if not hasattr(compression, "compress"):
        raise TypeError(
            f"allreduce takes Compression.none, Compression.fp16 or a Compressor class, got "
            f"{compression!r}: top-k needs the residual that DistributedOptimizer keeps"
        )
    reduction = _reduction(op, average)
    compressed, context = compression.compress(tensor)
    reduced = _Allreduce.apply(compressed, name, reduction, prescale_factor, postscale_factor)  # type: ignore[no-untyped-call]
    return compression.decompress(reduced, context)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce the tensor over all ranks in place, and return it."""
    reduction = _reduction(op, average)
    handle = allreduce_async_(tensor, None, name, reduction, prescale_factor, postscale_factor)
    output: torch.Tensor = synchronize(handle)
    return output


def allgather_async(tensor: torch.Tensor, name: str | None = None) -> int:
    """Begin to concatenate the ranks' tensors along dimension 0; return a handle."""
    if _checked(tensor).dim() == 0:
        raise ValueError("allgather needs a tensor with at least one dimension, got a scalar")
    array = to_array(tensor)
    rows, *rest = tensor.shape
    like = tensor.detach()

    def work(transport: Transport, votes: list[int]) -> NDArray[Any]:
        messages = transport.allgather(array.view(np.uint8))
        gathered = np.concatenate([message.view(array.dtype) for message in messages])
        return gathered.reshape(sum(votes), *rest)

    def finish(array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(device=like.device, dtype=like.dtype)

    shape = ", ".join(["*", *map(str, rest)])
    return _submit("allgather", name, f"{tensor.dtype} [{shape}]", work, finish, vote=rows)


def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """Return the ranks' tensors concatenated along dimension 0 (it may differ); differentiable."""
    output: torch.Tensor = _Allgather.apply(tensor, name)  # type: ignore[no-untyped-call]
    return output


def _broadcast(tensor: torch.Tensor, output: torch.Tensor, root_rank: int, name: str | None) -> int:
    ranks = size()
    if not 0 <= root_rank < ranks:
        raise ValueError(f"root_rank must lie in 0..{ranks - 1}, got {root_rank}")
    array = to_array(_checked(tensor))

    def work(transport: Transport, votes: list[int]) -> NDArray[Any]:
        return transport.broadcast(array.view(np.uint8), root_rank).view(array.dtype)

    facts = f"{tensor.dtype} {list(tensor.shape)} root_rank={root_rank}"
    return _submit("broadcast", name, facts, work, _writer(output))


def broadcast_async(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> int:
    """Begin to fetch the root's tensor; return a handle."""
    return _broadcast(tensor, torch.empty_like(tensor, requires_grad=False), root_rank, name)


def broadcast_async_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> int:
    """Begin to overwrite the tensor by the root's; it changes when the handle is synchronized."""
    return _broadcast(tensor, _checked_in_place(tensor), root_rank, name)


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Return the root's tensor; differentiable."""
    output: torch.Tensor = _Broadcast.apply(tensor, root_rank, name)  # type: ignore[no-untyped-call]
    return output


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Overwrite the tensor by the root's, and return it."""
    output: torch.Tensor = synchronize(broadcast_async_(tensor, root_rank, name))
    return output


def barrier() -> None:
    """Return when every rank has called it."""
    here = world.current()
    name = f"barrier.noname.{next(here.unnamed)}"
    # Agreeing on the operation is the barrier.
    here.engine.submit(name, [], lambda transport, votes: None).wait()


class _Allreduce(torch.autograd.Function):
    """Differentiable allreduce; the gradient is reduced alike."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, name: str | None, op: int, prescale: float, postscale: float
    ) -> Any:
        ctx.arguments = op, prescale, postscale
        return synchronize(allreduce_async(tensor, None, name, op, prescale, postscale))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        op, prescale, postscale = ctx.arguments
        reduced = allreduce(
            gradients[0], op=op, prescale_factor=prescale, postscale_factor=postscale
        )
        return reduced, None, None, None, None


class _Allgather(torch.autograd.Function):
    """Differentiable allgather; the gradient is averaged, and this rank's rows cut out."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None) -> Any:
        ctx.rows = tensor.shape[0] if tensor.dim() else 0
        return synchronize(allgather_async(tensor, name))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        reduced = allreduce(gradients[0], op=Average)
        rows = allgather(torch.tensor([ctx.rows]))
        start = int(rows[: rank()].sum())
        return reduced[start : start + ctx.rows], None


class _Broadcast(torch.autograd.Function):
    """Differentiable broadcast; the root gets the averaged gradient, the others zeros."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None) -> Any:
        ctx.root_rank = root_rank
        return synchronize(broadcast_async(tensor, root_rank, name))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        reduced = allreduce(gradients[0], op=Average)
        return reduced if rank() == ctx.root_rank else torch.zeros_like(reduced), None, None

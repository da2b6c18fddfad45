"""Reductions, and allreduce: every rank gets the reduction of the ranks' tensors, or lists of them.

Tensors are sent in the forms of Horovod's compressors. Adasum combines each tensor by itself;
tensors of one dtype share messages.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from collectives.algorithms import adasum
from collectives.transports import Transport

from ...compression import Compression, Compressor
from ...errors import InvalidCallError
from ...exchange.buckets.arrays import await_copies
from ...reduce_ops import NAMES, Adasum, Average, Max, Min, Product, Sum
from ...runtime.coordinator.fusion import DeferredGpuArray, Dense, Finish, scale, scale_tensor
from ...runtime.world.process_sets import ProcessSet, global_process_set
from .tensors import (
    accepted_by,
    check,
    check_in_place,
    describe,
    describe_each,
    memory_of,
    require_tensor,
    require_tensors,
    submit,
    synchronize,
    write,
)

_EXCHANGES: Final = {
    Average: "sum",
    Sum: "sum",
    Adasum: "adasum",
    Min: "min",
    Max: "max",
    Product: "product",
}
# For bools: Sum and Max give true where any rank's is, the others where every rank's is.
_BOOL_EXCHANGES: Final = {Average: "min", Sum: "max", Min: "min", Max: "max", Product: "min"}
# The dtype of an average's sum, by item size: it has room for 2^15 ranks and more.
_WIDE: Final[dict[int, Any]] = {1: np.dtype(np.int32), 2: np.dtype(np.int32), 4: np.dtype(np.int64)}


@dataclass(frozen=True)
class Reduction:
    """A reduction of the elements at one place on all ranks.

    Integers are averaged, and multiplied by a factor (in float64), truncating toward zero; an
    average with a postscale_factor is truncated once, when both are done. float16 and bfloat16
    are added in float32, and rounded to 16 bits at each hop; float16 is divided before it is
    summed for an average, as the sum could overflow. A bool is true after Sum and Max where any
    rank's is, after Average, Min and Product where every rank's is; factors do not change it.
    """

    op: int
    prescale_factor: float
    postscale_factor: float

    def __str__(self) -> str:
        return (
            f"op={NAMES[self.op]} prescale_factor={float(self.prescale_factor)} "
            f"postscale_factor={float(self.postscale_factor)}"
        )

    def begin(self, array: NDArray[Any] | torch.Tensor, dtype: torch.dtype, size: int) -> Dense:
        """Return the array that `size` ranks reduce for the elements of tensors of a dtype.

        array: those elements, on the host or on a GPU.

        Raises ValueError for a dtype that Adasum does not combine.
        """
        if self.op == Adasum and not dtype.is_floating_point:
            raise ValueError(f"Tensor type {dtype} is not supported by op=Adasum; floats are.")
        if self._divides_last(dtype):
            # The average's division and the postscale factor follow in `end`.
            return Dense(_ready(_widened(array)), _EXCHANGES[Average], self.prescale_factor)
        elements = _ready(array)
        if dtype == torch.bool:
            return Dense(elements, _BOOL_EXCHANGES[self.op])
        exchange = _EXCHANGES[self.op]
        if self.op != Average:
            return Dense(elements, exchange, self.prescale_factor, self.postscale_factor)
        if dtype == torch.float16:
            return Dense(elements, exchange, self.prescale_factor / size, self.postscale_factor)
        # After the sum, rounded once with the factor: only float16 could overflow by then.
        return Dense(elements, exchange, self.prescale_factor, self.postscale_factor / size)

    def end(self, elements: Any, dtype: torch.dtype, size: int) -> Any:
        """Return the elements of tensors of a dtype, once they are reduced.

        elements: an array on the host, or a tensor on a GPU.
        """
        if not self._divides_last(dtype):
            return elements
        if self.postscale_factor != 1.0:
            multiply(elements, self.postscale_factor / size)
            return elements
        if isinstance(elements, torch.Tensor):
            return elements.div(size, rounding_mode="trunc")
        # As torch truncates: exact, also beyond float64's integers.
        return elements // size + ((elements < 0) & (elements % size != 0))

    def _divides_last(self, dtype: torch.dtype) -> bool:
        return self.op == Average and not dtype.is_floating_point and dtype != torch.bool


def _widened(array: NDArray[Any] | torch.Tensor) -> NDArray[Any] | torch.Tensor:
    if isinstance(array, torch.Tensor):
        dtype = _WIDE.get(array.element_size())
        return array if dtype is None else array.to(getattr(torch, dtype.name))
    wide: NDArray[Any] = array.astype(_WIDE.get(array.itemsize, array.dtype))
    return wide


def _ready(array: NDArray[Any] | torch.Tensor) -> NDArray[Any] | DeferredGpuArray:
    return DeferredGpuArray.now(array) if isinstance(array, torch.Tensor) else array


def multiply(elements: Any, factor: float) -> None:
    """Multiply an array on the host, or a tensor on a GPU, in place."""
    if isinstance(elements, torch.Tensor):
        scale_tensor(elements, factor)
    else:
        scale(elements, factor)


def reduction_of(
    op: int | None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Reduction:
    """Return the reduction that Horovod's arguments mean; by default the average.

    Warns the caller's caller of the deprecated `average`. Raises ValueError where both are given,
    InvalidCallError for an unknown op, and for a factor that is NaN.
    """
    # Four frames: the warning is to name the script's line, behind `reduction_of` and the public
    # function.
    op = op_of(op, average, stacklevel=4)
    if op not in _EXCHANGES:
        raise InvalidCallError(f"op must be one of {', '.join(NAMES.values())}, got {op!r}")
    for factor in (prescale_factor, postscale_factor):
        if math.isnan(factor):  # which equals no rank's, not even this one's
            raise InvalidCallError("prescale_factor and postscale_factor must be numbers, got nan")
    return Reduction(op, prescale_factor, postscale_factor)


def op_of(
    op: int | None,
    average: bool | None,
    of_average: int = Average,
    of_sum: int = Sum,
    stacklevel: int = 3,
) -> int:
    """Return the op that `op` and the deprecated `average` mean, which is warned of."""
    if average is None:
        return of_average if op is None else op
    if op is not None:
        raise ValueError("the op parameter supersedes average; please provide only one of them")
    warnings.warn(
        "parameter `average` has been replaced by `op`: pass op=Average or op=Sum",
        DeprecationWarning,
        stacklevel=stacklevel,
    )
    return of_average if average else of_sum


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
    output: torch.Tensor = synchronize(
        _begin([tensor], name, reduction, process_set, in_place=True)
    )
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
    return _begin([tensor], name, reduction, process_set)


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
    return _begin([tensor], name, reduction, process_set, in_place=True)


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
    handle = _begin(tensors, name, reduction, process_set, group=True, in_place=True)
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
    return _begin(tensors, name, reduction, process_set, group=True)


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
    return _begin(tensors, name, reduction, process_set, group=True, in_place=True)


def _begin(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    reduction: Reduction,
    process_set: ProcessSet,
    *,
    group: bool = False,
    in_place: bool = False,
) -> int:
    """Begin to reduce a tensor, or a group; return a handle for the output, or a tuple of them."""
    for tensor in tensors if in_place else ():
        check_in_place(tensor)
    outputs = tensors if in_place else [torch.empty_like(tensor) for tensor in tensors]
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
        reduced = [
            dense.array.tensor if isinstance(dense.array, DeferredGpuArray) else dense.array
            for dense in denses
        ]
        with finished.on(tensors[0].device) if on_gpu else nullcontext():
            return [
                reduction.end(each, dtype, size)
                for each, dtype in zip(reduced, dtypes, strict=True)
            ]

    def finish(reduced: list[Any]) -> Any:
        finished.wait(reduced)
        written = tuple(map(write, reduced, outputs, memories))
        return written if group else written[0]

    finished = Finish()
    kind = "grouped_allreduce" if group else "allreduce"
    signature = describe_each(tensors, describe, group, str(reduction))
    fusion = () if combines else denses
    return submit(kind, name, process_set, signature, work, finish, on_gpu=on_gpu, fusion=fusion)


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
        return synchronize(_begin(tensors, name, *ctx.arguments, group=group))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        # By the function itself, so that the gradient has one, too; without a name, which may be in
        # use.
        reduced = _Allreduce.apply(ctx.group, None, *ctx.arguments, *gradients)  # type: ignore[no-untyped-call]
        return None, None, None, None, *(reduced if ctx.group else [reduced])

"""Allreduce, and the reductions: every rank gets the reduction of the ranks' tensors or lists.

Horovod's compressors may convert tensors for sending. Adasum combines each tensor separately, but
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
from ...runtime.world.process_sets import ProcessSet, global_process_set, require_process_set
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
# For bools: Sum and Max are true if any rank's is, the others if every rank's is.
_BOOL_EXCHANGES: Final = {Average: "min", Sum: "max", Min: "min", Max: "max", Product: "min"}
# The dtype of an integer average's sum, by item size: wide enough for at least 2^15 ranks.
_WIDE: Final[dict[int, Any]] = {1: np.dtype(np.int32), 2: np.dtype(np.int32), 4: np.dtype(np.int64)}


@dataclass(frozen=True)
class Reduction:
    """An elementwise reduction over the ranks.

    Integers: averages and factors (applied in float64) truncate toward zero; an average with a
    postscale_factor truncates once, after both. float16 and bfloat16: added in float32, rounded to
    16 bits at each hop; for an average float16 is divided before the sum, which could overflow.
    Bools: after Sum and Max true if any rank's is, after Average, Min and Product true if every
    rank's is; factors have no effect.
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
        """Return the array that `size` ranks reduce for tensors of a dtype.

        array: the tensors' elements, on the host or on a GPU.

        Raises ValueError for a dtype that Adasum does not support.
        """
        if self.op == Adasum and not dtype.is_floating_point:
            raise ValueError(f"Tensor type {dtype} is not supported by op=Adasum; floats are.")
        if self._divides_last(dtype):
            # `end` does the average's division and the postscale factor.
            return Dense(_reducible(_widened(array)), _EXCHANGES[Average], self.prescale_factor)
        elements = _reducible(array)
        if dtype == torch.bool:
            return Dense(elements, _BOOL_EXCHANGES[self.op])
        exchange = _EXCHANGES[self.op]
        if self.op != Average:
            return Dense(elements, exchange, self.prescale_factor, self.postscale_factor)
        if dtype == torch.float16:
            return Dense(elements, exchange, self.prescale_factor / size, self.postscale_factor)
        # Divide after the sum, to round once with the factor: only float16 could overflow in it.
        return Dense(elements, exchange, self.prescale_factor, self.postscale_factor / size)

    def end(self, elements: Any, dtype: torch.dtype, size: int) -> Any:
        """Return the final elements of tensors of a dtype from the reduced ones.

        elements: an array on the host, or a tensor on a GPU.
        """
        if not self._divides_last(dtype):
            return elements
        if self.postscale_factor != 1.0:
            multiply(elements, self.postscale_factor / size)
            return elements
        if isinstance(elements, torch.Tensor):
            return elements.div(size, rounding_mode="trunc")
        # Truncates as torch does, exactly, even beyond float64's integers.
        return elements // size + ((elements < 0) & (elements % size != 0))

    def _divides_last(self, dtype: torch.dtype) -> bool:
        return self.op == Average and not dtype.is_floating_point and dtype != torch.bool


def _widened(array: NDArray[Any] | torch.Tensor) -> NDArray[Any] | torch.Tensor:
    if isinstance(array, torch.Tensor):
        dtype = _WIDE.get(array.element_size())
        return array if dtype is None else array.to(getattr(torch, dtype.name))
    wide: NDArray[Any] = array.astype(_WIDE.get(array.itemsize, array.dtype))
    return wide


def _reducible(array: NDArray[Any] | torch.Tensor) -> NDArray[Any] | DeferredGpuArray:
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
    """Return the reduction for Horovod's arguments; by default the average.

    Warns if the deprecated `average` is used. Raises ValueError if both `op` and `average` are
    given, InvalidCallError for an unknown op or a factor that is NaN.
    """
    # 4: the warning names the script's line, two calls above `reduction_of`.
    op = op_of(op, average, stacklevel=4)
    if op not in _EXCHANGES:
        raise InvalidCallError(f"op must be one of {', '.join(NAMES.values())}, got {op!r}")
    for factor in (prescale_factor, postscale_factor):
        if math.isnan(factor):  # NaN never equals another rank's factor, so ranks would disagree
            raise InvalidCallError("prescale_factor and postscale_factor must be numbers, got nan")
    return Reduction(op, prescale_factor, postscale_factor)


def op_of(
    op: int | None,
    average: bool | None,
    of_average: int = Average,
    of_sum: int = Sum,
    stacklevel: int = 3,
) -> int:
    """Return the op for `op` and `average`; warn that `average` is deprecated."""
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

    Raises TypeError unless the compression has Horovod's compressor interface.
    """
    # Duck typing, as in Horovod: scripts bring their own compressors.
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
    """Combine float arrays over the ranks with Adasum, in place."""
    # dict.fromkeys, not a set: all ranks must visit the dtypes in the same order.
    for dtype in dict.fromkeys(dense.on_host.dtype for dense in denses):
        alike = [dense for dense in denses if dense.on_host.dtype == dtype]
        for dense in alike:
            # The engine scales only the arrays that it fuses.
            scale(dense.on_host, dense.prescale)
        lengths = [dense.on_host.size for dense in alike]
        whole = np.concatenate([dense.on_host for dense in alike])
        # The lengths separate the tensors: Adasum's factors are from each one's own dot products.
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

    `Reduction` describes how each dtype is handled.
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
    """Begin to reduce a tensor in place; do not use it until the handle is synchronized."""
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
    """Return each tensor reduced over the ranks, all of them or none; differentiable."""
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
    """Begin to reduce tensors over the ranks, all of them or none; return one handle."""
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
    """Begin to reduce tensors in place; do not use them until the handle is synchronized."""
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
    """Begin to reduce a tensor, or a group; return a handle for the output or the tuple of them."""
    for tensor in tensors if in_place else ():
        check_in_place(tensor)
    outputs = tensors if in_place else [torch.empty_like(tensor) for tensor in tensors]
    transport = require_process_set(process_set).engine.transport
    size = transport.size
    dtypes = [check(tensor).dtype for tensor in tensors]
    combines = reduction.op == Adasum  # not elementwise, so the engine cannot fuse it
    on_gpu = not combines and accepted_by(tensors, transport)
    # In the outputs' memory if possible, which saves the copy back.
    memories = [memory_of(o, t, on_gpu) for o, t in zip(outputs, tensors, strict=True)]
    # One wait for all copies, which run concurrently.
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
    """Differentiable allreduce; gradients of any order are reduced in the same way."""

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
        # Apply the function itself, so that the gradient is differentiable, too. Unnamed: the name
        # may be in use.
        reduced = _Allreduce.apply(ctx.group, None, *ctx.arguments, *gradients)  # type: ignore[no-untyped-call]
        return None, None, None, None, *(reduced if ctx.group else [reduced])

"""A reduction: its kind, and the factors before and after it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from ...errors import InvalidCallError
from ...reduce_ops import NAMES, Adasum, Average, Max, Min, Product, Sum
from ...runtime.coordinator.fusion import DeferredGpuArray, Dense, scale, scale_tensor

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

    def end(self, array: NDArray[Any], dtype: torch.dtype, size: int) -> NDArray[Any]:
        """Return the elements of tensors of a dtype, once they are reduced."""
        if self._divides_last(dtype):
            if self.postscale_factor != 1.0:
                scale(array, self.postscale_factor / size)
            else:  # exact, also beyond float64's integers
                array = array // size + ((array < 0) & (array % size != 0))
        return array

    def end_on_gpu(self, tensor: torch.Tensor, dtype: torch.dtype, size: int) -> torch.Tensor:
        """Return the elements as `end` does, of a tensor on a GPU."""
        if self._divides_last(dtype):
            if self.postscale_factor != 1.0:
                scale_tensor(tensor, self.postscale_factor / size)
            else:
                # torch truncates integers exactly, as `end` does on the host.
                return tensor.div(size, rounding_mode="trunc")
        return tensor

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


def reduction_of(
    op: int | None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Reduction:
    """Return the reduction that Horovod's arguments mean; by default the average.

    Warns the caller's caller of the deprecated `average`. Raises ValueError where both are given,
    InvalidCallError for an unknown op.
    """
    # Four frames: the warning is to name the script's line, behind `reduction_of` and the public
    # function.
    op = op_of(op, average, stacklevel=4)
    if op not in _EXCHANGES:
        raise InvalidCallError(f"op must be one of {', '.join(NAMES.values())}, got {op!r}")
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

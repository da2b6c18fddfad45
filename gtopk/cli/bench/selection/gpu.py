"""The methods on a GPU, by its own clock; nothing where there is none.

Rivals are torch's operators. Ours work on CuPy's views of the same tensors, on the same stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final

import numpy as np
import torch

from collectives import SparseVector, kernels
from collectives.kernels import device
from collectives.vector import index_dtype

from ....exchange.buckets.arrays import current_stream, view_array
from .methods import COPY, FLOOR, TORCH_SELECTORS, Array, Ours, Selector, Timed

# What one call of a method leaves: positions and values, tensors or arrays of its device.
Picks = tuple[Any, Any]
Work = Callable[[], Picks]
# A way to make the work on (residual, gradient, k); both keep their memory from round to round.
Maker = Callable[[torch.Tensor, torch.Tensor, int], Work]


def why_no_gpu() -> str:
    """Return why nothing is measured on a GPU; "" where there is one."""
    if not torch.cuda.is_available():
        return "nothing on a GPU: torch sees none"
    try:
        device.cupy()
    except ImportError as error:
        return f"nothing on a GPU: {error}"
    return ""


def floor(residual: torch.Tensor, gradient: torch.Tensor, k: int) -> Work:
    """Only add: what no method can do without."""
    nothing = residual[:0], residual[:0]

    def work() -> Picks:
        residual.add_(gradient)
        return nothing

    return work


def copy(residual: torch.Tensor, gradient: torch.Tensor, k: int) -> Work:
    """Only copy: what the memory gives where nothing is computed."""
    nothing = residual[:0], residual[:0]

    def work() -> Picks:
        residual.copy_(gradient)
        return nothing

    return work


def by_torch(selector: Selector) -> Maker:
    """Return what accumulates, selects and clears by torch's operators."""

    def make(residual: torch.Tensor, gradient: torch.Tensor, k: int) -> Work:
        def work() -> Picks:
            residual.add_(gradient)
            indices = selector(residual, k)
            values = residual[indices]
            residual[indices] = 0
            return indices, values

        return work

    return make


def ours(residual: torch.Tensor, gradient: torch.Tensor, k: int) -> Work:
    """Our kernels, launched one by one; the host waits for the number of entries, and goes on."""
    return on_arrays(view_array(residual), view_array(gradient), k)


def on_arrays(residual: Array, gradient: Array, k: int) -> Work:
    """Our kernels on arrays: those of a GPU, or any."""
    step = Ours(kernels)

    def work() -> Picks:
        picked = step(residual, gradient, k)
        return picked.indices, picked.values

    return work


MAKERS: Final[dict[str, Maker]] = {
    FLOOR: floor,
    COPY: copy,
    "gtopk-cuda": ours,
    **{name: by_torch(selector) for name, selector in TORCH_SELECTORS.items()},
}


class Gpu:
    """A GPU; every method works on the same two tensors, on one stream of torch and the kernels.

    on_stream: makes that stream the current one.
    clock:     runs a work on it, and returns its seconds and what it gave.
    """

    def __init__(
        self,
        of: torch.device,
        device: str,
        on_stream: Callable[[], AbstractContextManager[None]],
        clock: Callable[[Work], tuple[float, Picks]],
        makers: Mapping[str, Maker] = MAKERS,
    ) -> None:
        self.device = device
        self.names = list(makers)
        self._of, self._on_stream, self._clock, self._makers = of, on_stream, clock, makers
        self._made: dict[str, Work] = {}
        self._shape = 0, 0

    def clock(self, method: str) -> str:
        return "gpu"

    def begin_round(self, residual: Array, gradient: Array, k: int) -> None:
        """Bring the arrays to the GPU; methods are made anew for another length or k."""
        with self._on_stream():
            if self._shape != (residual.size, k):
                self._shape = residual.size, k
                self._held, self._residual, self._gradient = (
                    torch.zeros(residual.size, device=self._of) for _ in range(3)
                )
                self._made = {
                    name: make(self._residual, self._gradient, k)
                    for name, make in self._makers.items()
                }
            self._held.copy_(torch.from_numpy(residual))
            self._gradient.copy_(torch.from_numpy(gradient))

    def time(self, method: str) -> Timed:
        """Run one method by the GPU's clock."""
        with self._on_stream():
            self._residual.copy_(self._held)
            seconds, picks = self._clock(self._made[method])
            return Timed(_on_host(*picks, self._residual.numel()), {"gpu": seconds})


def open_gpu() -> Gpu:
    of = torch.device("cuda", torch.cuda.current_device())
    with torch.cuda.stream(torch.cuda.Stream(of)):  # the default one cannot be captured
        on_stream = current_stream(of)
    return Gpu(of, torch.cuda.get_device_name(of), on_stream, seconds_of)


def seconds_of(work: Work) -> tuple[float, Picks]:
    """Return how long the current stream took for it, and what it gave.

    The copy before is still under way: that the host launches takes no time where it does not wait.
    """
    begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()
    picks = work()
    done.record()
    done.synchronize()
    return begun.elapsed_time(done) / 1e3, picks


def _on_host(indices: Any, values: Any, length: int) -> SparseVector:
    """Return picks with NumPy arrays."""

    def host(array: Any) -> Array:
        if isinstance(array, torch.Tensor):
            array = array.cpu().numpy()
        return array if isinstance(array, np.ndarray) else np.asarray(array.get())

    return SparseVector(host(indices).astype(index_dtype(length)), host(values), length)

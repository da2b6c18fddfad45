"""All non-public names of the library that the check uses, in one place."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import torch

from collectives.kernels import device as kernels
from collectives.kernels.device import cuda
from collectives.kernels.device.step import Step
from gtopk.exchange.buckets.arrays import current_stream, view_array
from tests.collectives.kernels.device.compile_kernels import instances

# The kernels that a selection spends most of its time in, as their names begin.
LARGEST_KERNELS = ("mark", "expand", "search_level")

# A tensor's own memory as an array: CuPy's on a GPU, NumPy's on the host.
array_of = view_array


def on_stream_of_torch(device: str) -> AbstractContextManager[None]:
    """Make the kernels use torch's current stream of the first GPU; on the host, change nothing."""
    return current_stream(torch.device(device, 0) if device == "cuda" else torch.device("cpu"))()


class Compiled(NamedTuple):
    """A kernel: seconds to compile, registers per thread, bytes of memory."""

    name: str
    seconds: float
    registers: int
    local_bytes: int
    shared_bytes: int


def compile_kernels(threads: int) -> list[Compiled]:
    """Compile every kernel for the first GPU, in parallel threads: NVRTC releases the GIL."""
    cupy = kernels.cupy()

    def compile_one(name: str) -> Compiled:
        cupy.cuda.Device(0).use()
        begun = time.perf_counter()
        kernel = cuda._load(0, name)
        registers = kernel.num_regs  # loads it
        seconds = time.perf_counter() - begun
        return Compiled(name, seconds, registers, kernel.local_size_bytes, kernel.shared_size_bytes)

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(compile_one, instances()))


def step_as_a_graph(
    residual: torch.Tensor, gradient: torch.Tensor, k: int
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return a step of one rank with its wait, and its launch alone: once warm, a graph.

    Inside `on_stream_of_torch`. The sum is written beside the residual, so that it can be undone.
    """
    step = Step(cuda.CudaMachine(), residual.numel(), k, np.dtype(np.float32))
    ours, its, beside = array_of(residual), array_of(gradient), array_of(torch.empty_like(residual))

    def wait() -> None:
        picked, _ = step(ours, its, into=beside, threshold=step.threshold)
        kernels.clear_at(beside, picked.indices)

    return wait, lambda: step.launch(ours, its, into=beside, threshold=step.threshold)

"""Time each kernel on a GPU, and a copy of the same bytes.

One residual goes on from step to step, as error feedback has it; its gradients are normal numbers
(synthetic). Each round times every row once, in turn, so that ratios are of one run.

    stream   | spin | before | kernel | kernel | after |      by events: what the GPU works
    host       launches all of it while the GPU spins

Without the spin the GPU would reach the first event before the host has launched the kernel, and
the row would hold the host's time. Rows that end in "waited for" are by the host's clock instead,
from an idle GPU to the answer.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np

from collectives.kernels.device import codes, entries, selection
from collectives.kernels.device.cuda import CudaMachine, cupy
from collectives.kernels.device.machine import Scratch
from collectives.kernels.device.step import Step
from collectives.kernels.reference_indices import index_capacity
from collectives.vector import Array, SparseVector

# About half a millisecond at 2 GHz: longer than the host takes to launch what is timed.
_SPIN_CYCLES: Final = 1_000_000
_SPIN: Final = """
extern "C" __global__ void spin(long long cycles) {
  const long long begun = clock64();
  while (clock64() - begun < cycles) {}
}
"""


class WatchedMachine(CudaMachine):
    """The CUDA machine, with an event before and after each launch."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[tuple[str, Any, Any]] = []

    def launch(self, kernel: str, blocks: int, *arguments: Array | np.generic | None) -> None:
        """Enqueue a kernel between two events."""
        before, after = (cupy().cuda.Event() for _ in range(2))
        before.record()
        super().launch(kernel, blocks, *arguments)
        after.record()
        self.launches.append((kernel.partition("<")[0], before, after))


@functools.cache
def _spin() -> Any:
    return cupy().RawKernel(_SPIN, "spin")


def spin() -> None:
    """Keep the current stream busy while the host launches the next work."""
    _spin()((1,), (1,), (np.int64(_SPIN_CYCLES),))


def seconds_of(work: Callable[[], object]) -> float:
    """Return the current stream's seconds for `work`, which only launches."""
    before, after = (cupy().cuda.Event() for _ in range(2))
    spin()
    before.record()
    work()
    after.record()
    after.synchronize()
    return float(cupy().cuda.get_elapsed_time(before, after)) / 1e3


def seconds_until(work: Callable[[], object]) -> float:
    """Return the host's seconds from an idle current stream until all work is done."""
    stream = cupy().cuda.get_current_stream()
    stream.synchronize()
    begun = time.perf_counter()
    work()
    stream.synchronize()
    return time.perf_counter() - begun


def kernel_times(length: int, k: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return the microseconds of each row of one size: float32 [length], k entries."""
    arrays = cupy()
    with arrays.cuda.Stream(non_blocking=True):
        residual, gradient, spare, beside = (arrays.zeros(length, np.float32) for _ in range(4))
        step, watched = Step(CudaMachine(), length, k, np.float32), WatchedMachine()
        scratch, watched_scratch = Scratch(CudaMachine()), Scratch(watched)
        draw = arrays.random.default_rng(0).standard_normal
        found: dict[str, list[float]] = {}

        def note(name: str, seconds: float) -> None:
            found.setdefault(name, []).append(seconds)

        threshold = 0.0
        for number in range(rounds + 5):
            gradient[:] = draw(length, dtype=np.float32)

            note("copy", seconds_of(partial(arrays.copyto, spare, residual)))
            # Into other memory, so that every row of a round adds to the same residual.
            again = partial(step, spare, gradient, into=beside, threshold=threshold)
            note("step as a graph, waited for", seconds_until(again))
            replayed = partial(step.launch, spare, gradient, into=beside, threshold=step.threshold)
            note("step as a graph", seconds_of(replayed))
            launched = partial(
                selection.accumulate_and_select, scratch, spare, gradient, k, threshold, into=beside
            )
            note("step launched, waited for", seconds_until(launched))

            watched.launches.clear()
            spin()
            picked, threshold = selection.accumulate_and_select(
                watched_scratch, residual, gradient, k, threshold
            )
            for name in dict.fromkeys(name for name, *_ in watched.launches):
                spans = [pair for kernel, *pair in watched.launches if kernel == name]
                note(
                    f"kernel {name}",
                    sum(arrays.cuda.get_elapsed_time(*pair) for pair in spans) / 1e3,
                )
            entries.clear_at(scratch, residual, picked.indices)
            for name, seconds in _of_lists(scratch, picked, k).items():
                note(name, seconds)
            if number < 5:  # caches, clocks, graphs and the guess settle
                found.clear()

    return {
        name: {
            which: round(1e6 * of(times), 2)
            for which, of in (("median", statistics.median), ("min", min), ("max", max))
        }
        for name, times in found.items()
    }


def _of_lists(scratch: Scratch, picked: SparseVector, k: int) -> dict[str, float]:
    """Return the seconds of operations on lists of k entries, of which a tenth overlap."""
    held = picked.on_host()
    moved = (held.indices + (held.indices % 10 > 0)).astype(held.indices.dtype)
    distinct = np.append(True, moved[1:] > moved[:-1])
    # One element longer: the last index may have moved by one.
    ours = picked._replace(length=picked.length + 1)
    theirs = SparseVector(moved[distinct], held.values[distinct], ours.length).beside(picked.values)
    room = cupy().empty(index_capacity(picked.entries, picked.length, "blocks"), np.uint8)
    return {
        "merge, waited for": seconds_until(lambda: entries.merge(scratch, ours, theirs, k)),
        "pack blocks, waited for": seconds_until(
            lambda: codes.pack_indices(scratch, picked.indices, picked.length, room, "blocks")
        ),
        "round to bf16, waited for": seconds_until(
            lambda: codes.pack_values(scratch, picked.values, room[: 2 * picked.entries], "bf16")
        ),
    }

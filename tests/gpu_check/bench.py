"""Timings, alone on the device: copy, add, torch.topk, our step, and whole training steps.

Each size has a copy of the same bytes beside it, in the same process; n is of float32 elements, and
k = n / 1000. Gradients are normal numbers (synthetic), drawn anew for each repetition.
"""

from __future__ import annotations

import itertools
import time
import traceback
from collections.abc import Callable
from functools import partial

import torch
from common import (
    REPETITIONS,
    Clock,
    arguments,
    device_name,
    on_gpu,
    record,
    spread,
    synchronize,
)
from internals import array_of, on_stream_of_torch, step_as_a_graph
from kernel_times import kernel_times
from whole_steps import MODELS, whole_steps

from collectives import kernels

SIZES = {"cuda": (270_000, 25_600_000, 1_000_000_000), "cpu": (20_000, 200_000)}
# Until the guess of the next threshold has settled.
WARM = 8
# Bytes an element that must be moved at least.
COPY, ADD = 8, 12


class Sized:
    """The tensors of one size, and the clock that times work on them."""

    def __init__(self, n: int, device: str) -> None:
        self.n, self.k, self.device = n, max(1, n // 1000), device
        self.clock = Clock(device)
        self.residual, self.gradient = (torch.zeros(n, device=device) for _ in range(2))
        self.copied = self.measured("copy", lambda: self.residual.copy_(self.gradient), COPY)

    def measured(
        self, name: str, work: Callable[[], object], bytes_each: int = 0, **more: object
    ) -> float:
        """Time work on fresh gradients; record it relative to the copy; return its median."""
        times = [self._once(work) for _ in range(WARM + REPETITIONS)][WARM:]
        found = spread(times)
        copied = found["median_us"] if name == "copy" else self.copied
        of_copy = {}
        if bytes_each:
            rate = bytes_each * self.n / found["median_us"] / 1e6
            share = bytes_each / COPY * copied / found["median_us"]
            of_copy = {"terabytes_per_second": round(rate, 3), "of_copy_rate": round(share, 3)}
        record(
            name,
            n=self.n,
            k=self.k,
            device=device_name(self.device),
            repetitions=REPETITIONS,
            times_copy=round(found["median_us"] / copied, 2),
            **found,
            **of_copy,
            **more,
        )
        return found["median_us"]

    def _once(self, work: Callable[[], object]) -> float:
        self.gradient.normal_()
        return self.clock.once(work)


def floors(of: Sized) -> None:
    """Time torch: add, topk alone, and a step of accumulate, select and clear."""
    residual, gradient, k = of.residual, of.gradient, of.k
    of.measured("add", lambda: residual.add_(gradient), ADD)
    of.measured("torch.topk alone", lambda: torch.topk(gradient, k, sorted=False))

    def step() -> None:
        residual.add_(gradient)
        _, indices = torch.topk(residual.abs(), k, sorted=False)
        residual[indices].clone()
        residual[indices] = 0

    residual.zero_()
    of.measured("step by torch.topk", step, ADD)


def ours(of: Sized) -> None:
    """Time our accumulate, select and clear, including the host's wait for the count."""
    of.residual.zero_()
    with on_stream_of_torch(of.device):
        residual, gradient = array_of(of.residual), array_of(of.gradient)
        guess = 0.0

        def step() -> None:
            nonlocal guess
            picked, guess = kernels.accumulate_and_select(residual, gradient, of.k, guess)
            kernels.clear_at(residual, picked.indices)

        of.measured("our step, waited for", step, ADD)


def as_a_graph(of: Sized) -> None:
    """Time the step as a graph: with the host's wait, and on the GPU alone."""
    of.residual.normal_()
    with on_stream_of_torch(of.device):
        waited, replayed = step_as_a_graph(of.residual, of.gradient, of.k)
        of.measured("our step as a graph, waited for", waited, ADD)
        of.measured("our step as a graph", replayed, ADD)
        synchronize(of.device)
        begun = time.perf_counter()
        for _ in range(REPETITIONS):
            replayed()
        each = (time.perf_counter() - begun) / REPETITIONS
        record("to launch our step", n=of.n, host_us=round(1e6 * each, 1))
        synchronize(of.device)


def in_parts(of: Sized) -> None:
    """Time our step with the gradient whole, in two parts, aligned or not, and in many parts."""
    n = of.n
    cuts = {
        "one": [],
        "two, aligned": [4096],
        "two, shifted by 10": [10],
        "161": [n // 161 // 64 * 64 * number for number in range(1, 161)],
    }
    for name, at in cuts.items():
        of.residual.zero_()
        ends = [0, *at, n]
        tensors = [of.gradient[a:b].clone() for a, b in itertools.pairwise(ends)]
        with on_stream_of_torch(of.device):
            residual, parts = array_of(of.residual), [array_of(each) for each in tensors]
            guess = 0.0

            def step(residual=residual, parts=parts) -> None:  # type: ignore[no-untyped-def]
                nonlocal guess
                picked, guess = kernels.accumulate_and_select(
                    residual, parts if len(parts) > 1 else parts[0], of.k, guess
                )
                kernels.clear_at(residual, picked.indices)

            of.measured("our step, of parts", step, ADD, parts=name)


def each_kernel(of: Sized) -> None:
    """Record each kernel's time."""
    record("kernels", n=of.n, k=of.k, us=kernel_times(of.n, of.k, REPETITIONS))


def guarded(name: str, work: Callable[[], object]) -> bool:
    """Run a part; if it fails, record that and return False."""
    begun = time.perf_counter()
    try:
        work()
    except Exception as error:
        traceback.print_exc()
        record("failed", part=name, problem=f"{type(error).__name__}: {error}"[:500])
        return False
    print(f"-- {name}: {time.perf_counter() - begun:.1f} s", flush=True)
    return True


def main() -> int:
    """Time everything; return 0 if no part failed."""
    device = arguments().device
    gpu = on_gpu(device)
    only_on_gpu = [as_a_graph, each_kernel] if gpu else []
    well = True

    def run(n: int, *parts: Callable[[Sized], None]) -> None:
        nonlocal well
        of = Sized(n, device)
        for part in parts:
            well &= guarded(f"{part.__name__}, n = {n:,}", partial(part, of))

    small, usual, *huge = SIZES[device]
    run(small, floors, ours, *only_on_gpu)
    run(usual, floors, ours, *only_on_gpu, in_parts)
    for name in MODELS:
        well &= guarded(f"whole steps, {name}", partial(whole_steps, name, device))
    for n in huge:  # last, because they take most of the memory
        torch.cuda.empty_cache()
        run(n, floors, ours, *only_on_gpu)
    return not well


if __name__ == "__main__":
    raise SystemExit(main())

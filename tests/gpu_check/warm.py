"""Compile every kernel, and CuPy's own for our calls, so that later stages do not wait for it."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
from common import arguments, record, require_gpu
from internals import compile_kernels

from collectives import Transport, kernels, reduce
from collectives.algorithms import ON_DEVICE
from collectives.kernels.device import cupy
from collectives.transports import local_world, run_ranks


def main() -> None:
    """Compile, and record seconds, registers and spills."""
    require_gpu(arguments().device, "kernels are compiled for the one that is here")
    begun = time.perf_counter()
    compiled = compile_kernels(max(1, len(os.sched_getaffinity(0)) - 2))
    slowest = sorted(compiled, key=lambda each: -each.seconds)
    record(
        "kernels",
        count=len(compiled),
        seconds=round(time.perf_counter() - begun, 2),
        slowest={each.name: round(each.seconds, 2) for each in slowest[:5]},
        registers={c.name: c.registers for c in compiled},
        spilling=[c.name for c in compiled if c.local_bytes],
    )
    begun = time.perf_counter()
    reduce_by_every_algorithm(cupy())
    record("cupy's own", seconds=round(time.perf_counter() - begun, 2))
    assert not any(c.local_bytes for c in compiled), "a kernel spills registers"


def reduce_by_every_algorithm(arrays: Any) -> None:
    """Reduce a small GPU vector between two ranks in threads, by every algorithm on the device."""
    for algorithm in sorted(ON_DEVICE):

        def rank(transport: Transport, algorithm: str = algorithm) -> object:
            drawn = np.random.default_rng(transport.rank).standard_normal(4000)
            picked, _ = kernels.select(arrays.asarray(drawn.astype(np.float32)), 200)
            return reduce(picked, 200, transport, algorithm)

        run_ranks(local_world(2, 60), rank)


if __name__ == "__main__":
    main()

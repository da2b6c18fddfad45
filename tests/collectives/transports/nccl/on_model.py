"""Ranks with a GPU each, of the model of CUDA and NCCL in fake_cuda.py.

What runs on real GPUs is in test_nccl_gpu.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from collectives import Transport, run_ranks
from collectives.transports import local_world
from collectives.transports.nccl import NcclTransport
from collectives.transports.staged import StagedTransport
from tests.programs import collectives_transports as laws
from tests.programs.of_gpus import device, up

SIZES = [1, 2, 3, 5]


def message(size: int, *seed: int) -> np.ndarray:
    return laws.message(size, *seed)


def on_ranks(
    size: int,
    program: Callable[[NcclTransport], Any],
    timeout_seconds: float = 20,
    staged: bool = False,
) -> list[Any]:
    """Run a program on ranks with a GPU each, that GPU being the current one."""

    def rank(host: Transport) -> Any:
        with device(host.rank):
            if staged:
                return program(StagedTransport(host))
            return program(NcclTransport(host, timeout_seconds=timeout_seconds))

    return run_ranks(local_world(size, timeout_seconds), rank)


def complete_first_exchange(transport: NcclTransport) -> None:
    """Complete the first swap, so that later waits are those of kernels."""
    transport.exchange(up(message(1)), 1 - transport.rank)

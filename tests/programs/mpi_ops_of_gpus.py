"""Run mpi_ops.py on tensors that take the path of GPU tensors, with gloo on the host as NCCL.

Argument: an empty folder that all ranks see.
"""

from __future__ import annotations

import runpy
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import light_torch  # noqa: F401

from collectives import Transport
from collectives.transports import gpu, nccl
from collectives.transports.device_choice import GpuFacts
from gtopk.runtime.world import membership

calls: Counter[str] = Counter()


def signature(host: Transport, device: int | None) -> GpuFacts:
    """Return the signature of a rank with its own GPU, and torch's NCCL."""
    return GpuFacts(f"GPU-{host.ranks[host.rank]}", cupy="there is no GPU here", torch_nccl=22703)


def over_gpus(transport: Transport, in_sight: Sequence[int]) -> Transport:
    """Return an object that carries a host's tensors like those of a GPU."""
    if transport.size == 1:
        return transport
    return nccl.NcclTransport(
        transport,
        timeout_seconds=transport.timeout_seconds,
        automatic=True,
        torch_backend="gloo",
    )


class Counting(nccl.TorchCollectives):
    """Counts the operations."""

    def _run(self, kind: str, begin: Any) -> None:
        calls[kind] += 1
        super()._run(kind, begin)


gpu.own_gpu_facts = signature
nccl.TorchCollectives = Counting
membership.over_gpus = over_gpus

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).with_name("mpi_ops.py")), run_name="__main__")
    assert set(calls) >= {"allreduce", "broadcast", "alltoall", "reduce"}, calls
    print("as on GPUs\n", end="", flush=True)

"""Check which transport `open_transport("mpi")` opens on ranks with GPUs, and its laws.

MPI is real; the GPUs are the model in fake_cuda.py, whose memory any MPI accepts. The argument
selects the case.
"""

from __future__ import annotations

import importlib.util
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from collectives_job import job
from collectives_transports import LARGE, LAWS, message
from of_gpus import OfGpus, device, up, without_counts

from collectives import Transport, open_transport
from collectives.transports import direct, mpi
from collectives.transports.direct import DirectTransport
from collectives.transports.mpi import MpiTransport
from collectives.transports.staged import StagedTransport

FAKE_CUDA = Path(__file__).parents[1] / "collectives" / "fake_cuda.py"
OPENS = {"direct": DirectTransport, "staged": StagedTransport, "none": MpiTransport}


def model() -> Any:
    """Return a model of a machine with GPUs, which `import cupy` finds from now on."""
    spec = importlib.util.spec_from_file_location("fake_cuda", FAKE_CUDA)
    fake_cuda = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fake_cuda)
    cuda = fake_cuda.Cuda(gpus=8)
    sys.modules.update(cuda.modules())
    return cuda


def check_copies(transport: Transport, cuda: Any, direct: bool) -> None:
    """Swap a message; staged, it is copied once down and once up."""
    peer = transport.rank ^ 1
    if peer < transport.size:
        sent = up(message(1000, transport.rank))
        cuda.copies.clear()
        received = transport.exchange(sent, peer)
        kinds = [(kind, size) for kind, _, size in cuda.copies]
        assert kinds == ([] if direct else [("down", 1000), ("up", 1000)])
        assert received.get().tobytes() == message(1000, peer).tobytes()


def main(way: str) -> None:
    cuda = model()
    refusal = "" if way == "direct" else "the library says no"
    with mock.patch.object(direct, "why_staged", return_value=refusal):
        from mpi4py import MPI

        if way == "none" and MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1:
            cuda.gpus = 0  # on one rank only
        transport = open_transport("mpi", timeout_seconds=60)
    laws = without_counts(LAWS)
    with job(transport), device(transport.rank) if cuda.gpus else nullcontext():
        assert type(transport) is OPENS[way]
        assert transport.supports_device_messages == (way != "none")
        assert transport.name == "mpi"
        for law in laws:
            law(transport)
        if way != "none":
            check_copies(transport, cuda, way == "direct")
            for law in laws:
                law(OfGpus(transport))
            with mock.patch.object(mpi, "PIECE_BYTES", 16):
                for law in laws:
                    if law not in LARGE:
                        law(OfGpus(transport))
        if way == "direct":
            with pytest.raises(ValueError, match="contiguous uint8"):
                transport.send(up(np.zeros(3)), transport.rank)
            transport.check_messages()  # by the hosts
            check_copies(transport, cuda, direct=False)
        assert cuda.misuses == []
    print(f"rank {transport.rank} of {transport.size}: {way}\n", end="", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

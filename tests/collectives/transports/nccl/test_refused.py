"""Mismatched arrays, and arrays that cannot be sent, are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from collectives import MismatchError, Transport, run_ranks
from collectives.transports import local_world
from collectives.transports.nccl import NcclTransport
from collectives.transports.staged import StagedTransport, TransferHeader, TransferMethod
from tests.collectives.transports.nccl.on_model import message, on_ranks
from tests.programs.of_gpus import device, up


def test_mismatched_arrays_raise_on_all_ranks_and_the_job_continues(cuda: Any) -> None:
    def program(transport: NcclTransport) -> None:
        arrays = [
            np.zeros(5 + (transport.rank == 2)),
            np.zeros(5, [int, float][transport.rank % 2]),
        ]
        text = r"rank 2 calls allreduce \(sum\) of float64 \[6\], but rank 0 calls .*\[5\]"
        with pytest.raises(MismatchError, match=text):
            transport.allreduce(up(arrays[0]))
        with pytest.raises(MismatchError, match=r"rank 1 calls .*float64 .* rank 0 .*int64"):
            transport.allreduce(up(arrays[1]), "max")
        bounds = [0, 1 + transport.rank // 2, 3, 5]
        with pytest.raises(MismatchError, match=r"cut at \[0, 2, 3, 5\], but .* \[0, 1, 3, 5\]"):
            transport.reduce_scatter(up(np.zeros(5)), bounds)
        total = up(np.ones(5))
        transport.allreduce(total)
        assert total.get().tolist() == [3] * 5

    on_ranks(3, program)


def test_dtype_unknown_to_nccl_is_refused(cuda: Any) -> None:
    with pytest.raises(TypeError, match=r"NCCL reduces int8, .*; got complex64"):
        on_ranks(2, lambda transport: transport.allreduce(up(np.zeros(3, np.complex64))))


def test_allgather_of_host_and_gpu_messages_mixed_is_refused(cuda: Any) -> None:
    def program(transport: NcclTransport) -> None:
        if transport.rank == 0:
            transport.allgather(message(100))
        else:
            with pytest.raises(MismatchError, match="rank 0 gathers host messages, but rank 1"):
                transport.allgather(up(message(100)))

    on_ranks(2, program)


@pytest.mark.parametrize("fault", ["dtype", "strides", "gpu"])
def test_non_contiguous_non_byte_or_foreign_gpu_messages_are_refused(cuda: Any, fault: str) -> None:
    def program(transport: NcclTransport) -> None:
        with device(1 if fault == "gpu" else 0):
            array = up(np.zeros(8, np.float32 if fault == "dtype" else np.uint8))
        array = array[::2] if fault == "strides" else array
        text = {
            "dtype": r"must be uint8 \[m\], got float32 \[8\]",
            "strides": "contiguous and on that GPU, got one on GPU 0 with strides",
            "gpu": r"rank 0 uses GPU 0:.* got one on GPU 1 .*torch.cuda.set_device\(.*staged",
        }[fault]
        with pytest.raises(ValueError, match=text):
            transport.exchange(array, 0)
        with pytest.raises(ValueError, match=text):
            transport.send(array, 0)

    on_ranks(1, program)


def test_message_over_nccl_to_a_rank_without_nccl_is_refused(cuda: Any) -> None:
    def program(host: Transport) -> None:
        if host.rank == 0:
            host.send(TransferHeader(TransferMethod.NCCL, 9).encode(), 1)()
        else:
            with pytest.raises(MismatchError, match="rank 0 sends over NCCL, which rank 1 is not"):
                StagedTransport(host).receive(0)

    run_ranks(local_world(2), program)

"""The model of CUDA and NCCL itself."""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
import pytest

from tests.collectives import fake_cuda
from tests.programs import collectives_transports as laws
from tests.programs.of_gpus import device, up


def pair_of_communicators(cuda: Any) -> list[Any]:
    nccl = sys.modules["cupy.cuda.nccl"]
    unique_id, made = nccl.get_unique_id(), {}

    def make(rank: int) -> None:
        with device(rank):
            made[rank] = nccl.NcclCommunicator(2, unique_id, rank)

    laws.together(*(lambda r=rank: make(r) for rank in range(2)))
    return [made[0], made[1]]


def launch(cuda: Any, communicator: Any, calls: list[tuple[str, Any]]) -> Any:
    """Enqueue calls as one group; return the event of their end."""
    cupy, nccl = sys.modules["cupy"], sys.modules["cupy.cuda.nccl"]
    with device(communicator.device):
        stream = cupy.cuda.Stream(non_blocking=True)
        nccl.groupStart()
        for name, array in calls:
            getattr(communicator, name)(
                array.data.ptr, array.size, 1, 1 - communicator.rank, stream.ptr
            )
        nccl.groupEnd()
        return stream.record()


def array_on(number: int, size: int) -> Any:
    with device(number):
        array = up(np.full(size, number, np.uint8))
        array.get()
        return array


@pytest.mark.parametrize(
    ("mine", "theirs", "ends"),
    [
        ([("send", 4), ("recv", 4)], [("send", 4), ("recv", 4)], True),
        ([("send", 4)], [("recv", 4)], True),
        ([("send", 4)], [("recv", 5)], False),
    ],
)
def test_fake_nccl_completes_only_matching_calls(
    cuda: Any, mine: list[Any], theirs: list[Any], ends: bool
) -> None:
    communicators = pair_of_communicators(cuda)
    events, kept_arrays = [], []

    def start(rank: int, calls: list[Any]) -> None:
        arrays = [(name, array_on(rank, size)) for name, size in calls]
        kept_arrays.append(arrays)
        events.append(launch(cuda, communicators[rank], arrays))

    laws.together(lambda: start(0, mine), lambda: start(1, theirs))
    deadline = time.monotonic() + (10 if ends else 0.1)
    while time.monotonic() < deadline and not all(event.done for event in events):
        time.sleep(0.001)
    assert all(event.done for event in events) == ends
    communicators[0].abort()
    with pytest.raises(fake_cuda.NcclError):
        communicators[0].check_async_error()


def test_fake_nccl_deadlocks_on_ungrouped_sends_to_each_other(cuda: Any) -> None:
    communicators = pair_of_communicators(cuda)
    arrays = [array_on(rank, 4) for rank in range(2)]
    both = [("send", 4), ("recv", 4)]
    events = {}

    def start(rank: int) -> None:
        own = arrays[rank]
        in_a_group = launch(cuda, communicators[rank], [(name, own) for name, _ in both])
        for name, _ in both:
            events[rank, name] = launch(cuda, communicators[rank], [(name, own)])
        while not in_a_group.done:
            time.sleep(0.001)

    laws.together(lambda: start(0), lambda: start(1))
    time.sleep(0.1)
    assert not any(event.done for event in events.values())


def test_fake_cuda_reports_use_of_freed_memory(cuda: Any) -> None:
    address = array_on(0, 4).data.ptr
    assert cuda.bytes_at(address, 4, 0).size == 4
    assert cuda.misuses.pop() == "4 bytes were used after they were freed"


def test_fake_cuda_array_refuses_implicit_conversion_to_numpy() -> None:
    cuda = fake_cuda.Cuda(gpus=1)
    array = fake_cuda.asarray(cuda, np.arange(3))
    for use in (np.asarray, list, np.sum):
        with pytest.raises(TypeError):
            use(array)
    assert array.get().tolist() == [0, 1, 2]
    assert array._content is not None
    cuda.off.set()

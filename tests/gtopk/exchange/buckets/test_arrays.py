"""Tensors as arrays: copies that MPI can reduce, and views that share memory."""

from __future__ import annotations

import threading
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from collectives.kernels import Momentum, accumulate_and_select
from collectives.kernels.device import cuda
from collectives.kernels.narrow import BFLOAT16, widen
from gtopk.exchange.buckets.arrays import (
    current_stream,
    current_streams,
    from_array,
    to_array,
    view_array,
    view_tensor,
)

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES)
def test_to_array_copies_and_from_array_restores(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0, 1], [2, 3]]).to(dtype)
    array = to_array(tensor)
    assert array.shape == (4,)
    array_before = array.copy()
    tensor.zero_()
    assert np.array_equal(array, array_before)  # a copy, not a view
    back = from_array(array, tensor)
    assert (back.shape, back.dtype) == (tensor.shape, dtype)
    assert back.tolist() == torch.tensor([[0, 1], [2, 3]]).to(dtype).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_views_share_memory_in_both_directions(dtype: torch.dtype) -> None:
    tensor = torch.zeros(2, 3, dtype=dtype, requires_grad=True)
    array = view_array(tensor)
    array[4] = 7
    assert tensor[1, 1].item() == 7
    view_tensor(array)[0] = 5
    assert tensor[0, 0].item() == 5


def test_bfloat16_is_copied_as_16_bits() -> None:
    tensor = torch.tensor([1.0, -2.5, 0.0, 3.0], dtype=torch.bfloat16)[::2]  # not contiguous
    array = to_array(tensor)
    assert (array.dtype, array.nbytes) == (BFLOAT16, 4)
    assert widen(array).tolist() == [1.0, 0.0]


def test_bfloat16_is_viewed_as_uint16() -> None:
    tensor = torch.tensor([1.0, -2.5], dtype=torch.bfloat16)
    array = view_array(tensor)
    assert array.dtype == np.uint16
    assert array.tolist() == [0x3F80, 0xC020]


def test_view_of_a_noncontiguous_tensor_raises() -> None:
    with pytest.raises(ValueError, match=r"strides \(1, 3\) for shape \[3, 2\].*contiguous\(\)"):
        view_array(torch.zeros(2, 3).t())


def test_current_stream_on_the_host_does_nothing() -> None:
    with current_stream(torch.device("cpu"))():
        assert view_array(torch.ones(1)).tolist() == [1]


class Gpus(threading.local):
    """This thread's current GPU, for CUDA and for torch, which may set it lazily.

    with_context: the GPUs of all threads with a context; setting a GPU opens one.
    """

    with_context: set[int]
    to_cuda = 0
    pending: int | None = None

    def __init__(self, with_context: set[int]) -> None:
        self.with_context = with_context

    @property
    def to_torch(self) -> int:
        return self.to_cuda if self.pending is None else self.pending

    def set(self, number: int) -> None:
        self.to_cuda, self.pending = number, None
        self.with_context.add(number)

    def exchange(self, number: int) -> int:
        before = self.to_torch
        self.set(number)
        return before

    def exchange_if_opened(self, number: int) -> int:
        before = self.to_torch
        if number in self.with_context:
            self.set(number)
        else:
            self.pending = number
        return before

    @contextmanager
    def of_cupy(self, number: int) -> Any:
        before = self.to_cuda
        self.set(number)
        yield
        self.set(before)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    """GPUs that torch and CuPy can use, without contexts so far."""
    gpus = Gpus(set())

    def stream(of: torch.device | None = None) -> Any:
        number = gpus.to_torch if of is None else of.index
        return SimpleNamespace(
            device=torch.device("cuda", number), device_index=number, cuda_stream=number
        )

    def index(of: Any, optional: bool = False) -> int:
        return gpus.to_torch if of is None else torch.device(of).index

    for name, model in {
        "_exchange_device": gpus.exchange,
        "_maybe_exchange_device": gpus.exchange_if_opened,
        "_get_device_index": index,
        "current_stream": stream,
        "set_stream": lambda stream: gpus.set(stream.device_index),
    }.items():
        monkeypatch.setattr(torch.cuda, name, model)
    cupy = SimpleNamespace(
        Device=gpus.of_cupy,
        Stream=SimpleNamespace(from_external=nullcontext),
        get_allocator=lambda: None,
        using_allocator=nullcontext,
    )
    monkeypatch.setattr(cuda, "cupy", lambda: SimpleNamespace(cuda=cupy))
    return gpus


def test_thread_on_another_gpus_stream_opens_no_context_on_gpu_0(gpus: Gpus) -> None:
    on_stream = current_stream(torch.device("cuda", 1))
    seen = []

    def work() -> None:
        for _ in range(2):
            with on_stream():
                seen.append((gpus.to_cuda, gpus.to_torch))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(1, 1)] * 2
    assert gpus.with_context == {1}


def test_streams_of_several_gpus_need_no_cupy(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "cupy", None)  # must not be used
    on_streams = current_streams([torch.device("cuda", 1), torch.device("cuda", 2)])
    with on_streams():
        assert gpus.with_context == {1, 2}
    assert gpus.to_torch == 0


@pytest.mark.parametrize("used", [True, False])
def test_current_gpu_is_restored_after_a_stream(gpus: Gpus, used: bool) -> None:
    if used:
        gpus.set(0)
    with current_stream(torch.device("cuda", 1))():
        assert (gpus.to_cuda, gpus.to_torch) == (1, 1)
    assert gpus.to_torch == 0
    assert gpus.with_context == ({0, 1} if used else {1})


@pytest.mark.gpu
def test_torch_and_kernels_share_memory_and_order_on_a_gpu() -> None:
    pytest.importorskip("cupy", reason="no cupy here")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU here")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)  # unordered work would run first
        gradient = torch.arange(100_000, dtype=torch.float32, device="cuda")
        residual, velocity = torch.ones_like(gradient), torch.zeros_like(gradient)
        with current_stream(residual.device)():
            picked, _ = accumulate_and_select(
                view_array(residual),
                view_array(gradient),
                2,
                momentum=Momentum(view_array(velocity), 0.9),
            )
            values = view_tensor(picked.values)
        torch.cuda._sleep(1_000_000)
        assert values.tolist() == [99_999, 100_000]
        assert residual[-1].item() == 100_000
        assert velocity[-1].item() == 99_999

"""Gradients as one vector, read and written in place, in the same order on all ranks."""

from __future__ import annotations

import logging
import math
import sys
import weakref
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from collectives.kernels import accumulate_and_select
from collectives.vector import SparseVector
from gtopk.exchange.buckets import arrays, buckets
from gtopk.exchange.buckets.buckets import Bucket, are_finite


@pytest.fixture(autouse=True)
def _small_gradients_stay_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep small gradients in place; otherwise these would all be copied."""
    monkeypatch.setattr(buckets, "_SMALL", 0)


def bucket_of(*tensors: torch.Tensor, weight: float = 1.0) -> Bucket:
    """Return a bucket of parameters with these gradients."""
    parameters = [torch.nn.Parameter(torch.zeros_like(tensor)) for tensor in tensors]
    for parameter, tensor in zip(parameters, tensors, strict=True):
        parameter.grad = tensor.clone()
    bucket = Bucket(parameters)
    bucket.capture_gradients(weight)
    return bucket


def added(bucket: Bucket) -> np.ndarray:
    """Return a residual of zeros after adding the bucket."""
    residual = np.zeros(bucket.length, bucket.dtype)
    accumulate_and_select(residual, bucket.addend(), 1, weight=bucket.weight)
    return residual


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_large_gradients_are_read_and_written_in_place(dtype: torch.dtype) -> None:
    tensors = [torch.arange(6.0).reshape(2, 3).to(dtype), torch.ones(0, dtype=dtype)]
    bucket = bucket_of(*tensors, torch.tensor(8.0, dtype=dtype), weight=1 / 3)
    assert added(bucket).tolist() == [bucket.dtype.type(1 / 3) * x for x in (0, 1, 2, 3, 4, 5, 8)]
    places = [parameter.grad.data_ptr() for parameter in bucket.parameters]
    update = SparseVector(np.array([1, 6], np.int32), np.array([5, 7], bucket.dtype), 7)
    bucket.scatter_sparse(update)
    first, empty, last = (parameter.grad for parameter in bucket.parameters)
    assert first.tolist() == [[0, 5, 0], [0, 0, 0]]
    assert (empty.numel(), last.item()) == (0, 7)
    assert places == [parameter.grad.data_ptr() for parameter in bucket.parameters]
    assert "flat" not in vars(bucket)  # no array of the vector's length exists


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_small_gradients_are_copied_into_a_flat_array_and_back(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "_SMALL", 4)
    tensors = [torch.arange(6.0).reshape(2, 3).to(dtype), torch.ones(0, dtype=dtype)]
    bucket = bucket_of(*tensors, torch.tensor(8.0, dtype=dtype), weight=1 / 3)
    assert added(bucket).tolist() == [bucket.dtype.type(1 / 3) * x for x in (0, 1, 2, 3, 4, 5, 8)]
    assert "flat" in vars(bucket)
    bucket.scatter_sparse(
        SparseVector(np.array([1, 6], np.int32), np.array([5, 7], bucket.dtype), 7)
    )
    assert [p.grad.tolist() for p in bucket.parameters] == [[[0, 5, 0], [0, 0, 0]], [], 7]


def test_gradients_of_mixed_dtypes_form_one_vector() -> None:
    halves = torch.tensor([1.0, 2.0]).bfloat16()
    bucket = bucket_of(halves, torch.tensor([3.0, 1e-3]), torch.tensor([4.0]).half(), weight=0.5)
    assert added(bucket).tolist() == [0.5, 1.0, 1.5, np.float32(1e-3) / 2, 2.0]
    bucket.scatter_sparse(
        SparseVector(np.array([1, 3], np.int32), np.array([1.5, 2.5], np.float32), 5)
    )
    grads = [parameter.grad for parameter in bucket.parameters]
    assert [grad.tolist() for grad in grads] == [[0, 1.5], [0, 2.5], [0]]
    assert grads[0].dtype == torch.bfloat16


def test_vector_has_the_order_of_the_parameters_memory() -> None:
    image = torch.arange(16.0).reshape(1, 2, 2, 4)
    last = image.to(memory_format=torch.channels_last)
    assert added(bucket_of(image)).tolist() == list(range(16))
    in_memory = last.permute(0, 2, 3, 1).flatten().tolist()
    assert added(bucket_of(last)).tolist() == in_memory
    # A gradient with other strides than its parameter is converted to these, and back.
    bucket = bucket_of(last)
    bucket.parameters[0].grad = image.clone()
    bucket.capture_gradients(1.0)
    assert added(bucket).tolist() == in_memory
    bucket.scatter_sparse(SparseVector(np.array([1], np.int32), np.array([9], np.float32), 16))
    assert bucket.parameters[0].grad[0, 1, 0, 0] == 9
    assert bucket.parameters[0].grad.sum() == 9


def test_stride_of_a_dimension_of_size_1_is_ignored() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3, 2, 1, 1).to(memory_format=torch.channels_last))
    parameter.grad = torch.arange(6.0).reshape(3, 2, 1, 1)
    bucket = Bucket([parameter])
    bucket.capture_gradients(1.0)
    assert added(bucket).tolist() == [0, 1, 2, 3, 4, 5]
    assert "flat" not in vars(bucket)


@pytest.mark.parametrize("elements", [3, 20_000])
def test_weight_multiplies_the_gathered_vector_only(elements: int) -> None:
    gradient = torch.arange(float(elements))
    bucket = bucket_of(gradient.clone(), gradient.clone())
    bucket.capture_gradients(0.3)
    gathered = torch.from_numpy(bucket.gather())
    assert torch.equal(gathered, torch.cat([gradient, gradient]) * 0.3)
    assert all(torch.equal(p.grad, gradient) for p in bucket.parameters)


def test_scatter_into_a_long_gradient_increments_its_torch_version() -> None:
    length = 17_000_000  # longer than what `clear` writes past the caches
    bucket = bucket_of(torch.ones(length))
    bucket.capture_gradients(1.0)
    added(bucket)
    version = bucket.parameters[0].grad._version
    bucket.scatter_sparse(SparseVector(np.array([5], np.int32), np.array([2], np.float32), length))
    assert bucket.parameters[0].grad._version > version
    assert bucket.parameters[0].grad.count_nonzero() == 1
    assert bucket.parameters[0].grad[5] == 2


def test_missing_gradient_counts_as_zeros_and_may_stay_missing() -> None:
    for may_stay, value, is_present in [(True, 0, False), (False, 0, True), (True, 2, True)]:
        bucket = bucket_of(torch.ones(2), torch.ones(3))
        bucket.parameters[1].grad = None
        bucket.capture_gradients(1.0)
        assert added(bucket).tolist() == [1, 1, 0, 0, 0]
        values = np.array([1, value], np.float32)
        bucket.scatter_sparse(SparseVector(np.array([0, 3], np.int32), values, 5))
        bucket.keep_gradients({0, 1} if may_stay else ())
        grad = bucket.parameters[1].grad
        assert (grad is not None) == is_present
        assert grad is None or grad.tolist() == [0, value, 0]


@pytest.mark.parametrize("end", [lambda bucket: bucket.keep_gradients({0}), Bucket.poison])
def test_bucket_releases_gradients_after_the_step(end: Any) -> None:
    bucket = bucket_of(torch.ones(4))
    memory = weakref.ref(bucket.addend()[0].base)
    end(bucket)
    bucket.parameters[0].grad = None
    assert memory() is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_all_finite_finds_one_bad_number(dtype: torch.dtype, bad: float) -> None:
    image = torch.full((2, 3, 4, 4), 3e4, dtype=dtype)
    wrong = image.clone()
    wrong[1, 2, 3, 1] = bad
    for form in (torch.contiguous_format, torch.channels_last):
        for other in (dtype, torch.float32):
            beside = torch.ones(2, dtype=other)
            assert bucket_of(image.to(memory_format=form), beside).all_finite()
            assert not bucket_of(wrong.to(memory_format=form), beside).all_finite()


def test_gathered_gradients_are_weighted_and_scattered_back() -> None:
    bucket = bucket_of(torch.ones(2, 2), torch.full((3,), 2.0), weight=0.25)
    flat = bucket.gather()
    assert flat.tolist() == [0.25] * 4 + [0.5] * 3
    flat += 1
    bucket.scatter()
    assert bucket.parameters[1].grad.tolist() == [1.5] * 3
    with bucket.flat_on_host() as host:
        host *= 2
    assert bucket.flat.tolist() == [2.5] * 4 + [3.0] * 3


LARGE = {
    torch.float16: 60_000.0,
    torch.bfloat16: 3e38,
    torch.float32: 3e38,
    torch.float64: 1e308,
}


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("dtype", LARGE, ids=str)
def test_large_finite_gradients_count_as_finite(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, on_gpu: bool
) -> None:
    """Regression: the check used sums, and a sum of finite elements may overflow."""
    monkeypatch.setattr(buckets, "_on_gpu", lambda device: on_gpu)
    gradients = [torch.full(shape, LARGE[dtype], dtype=dtype) for shape in ((16, 8), (16,), ())]
    assert are_finite([*gradients, gradients[0].t(), gradients[0].to_sparse()])
    for spoilt in gradients:
        for value in (math.inf, -math.inf, math.nan):
            before = spoilt.clone()
            spoilt.view(-1)[-1] = value
            assert not are_finite(gradients)
            spoilt.copy_(before)
    gradients[0][3, 4] = math.nan
    assert not are_finite([gradients[0].t()])
    assert not are_finite([gradients[0].to_sparse()])
    assert are_finite([torch.zeros(0)])


class OnGpu(torch.Tensor):
    """A tensor that claims to be on a GPU."""

    device = torch.device("cuda", 0)


def test_missing_cupy_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def absent() -> Any:
        raise ImportError("pip install cupy-cuda12x")

    monkeypatch.setattr(arrays.device, "cupy", absent)
    arrays._kernels_reach_gpus.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, "gtopk"):
            for _ in range(2):
                assert arrays.device_of([OnGpu(), OnGpu()]) == torch.device("cpu")
        (record,) = caplog.records
        assert "through host memory" in record.getMessage()
        assert "cupy-cuda12x" in record.getMessage()
        arrays._kernels_reach_gpus.cache_clear()
        monkeypatch.setattr(arrays.device, "cupy", lambda: sys)
        assert arrays.device_of([OnGpu()]) == OnGpu.device
        assert arrays.device_of([OnGpu(), torch.zeros(1)]) == torch.device("cpu")
    finally:
        arrays._kernels_reach_gpus.cache_clear()


def test_copies_from_gpu_to_host_run_on_the_gpus_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices: list[Any] = []

    def streams(of: Any) -> Any:
        devices.append(of)
        return nullcontext

    monkeypatch.setattr(buckets, "device_of", lambda parameters: torch.device("cpu"))
    monkeypatch.setattr(buckets, "current_streams", streams)
    monkeypatch.setattr(OnGpu, "is_cuda", True, raising=False)
    bucket = Bucket([torch.zeros(3).as_subclass(OnGpu), torch.nn.Parameter(torch.zeros(2))])
    bucket.capture_gradients(1.0)
    bucket.capture_zeros(1.0)
    with bucket.on_stream():
        assert devices == [[OnGpu.device]] * 3


@pytest.mark.parametrize(
    "view",
    [
        lambda wide: wide[:, ::2],
        lambda wide: wide[:, :1],
        lambda wide: wide[::2],
        lambda wide: wide.t(),
        lambda wide: wide[1:, 1:],
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_checksum_shows_a_changed_element_for_any_strides(dtype: torch.dtype, view: Any) -> None:
    wide = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    gradient = view(wide)
    parameter = torch.nn.Parameter(torch.zeros(gradient.shape, dtype=dtype))
    parameter.grad = gradient
    assert parameter.grad.data_ptr() == gradient.data_ptr()
    bucket = Bucket([parameter, torch.nn.Parameter(torch.zeros(0, dtype=dtype))])
    bucket.capture_gradients(1.0)
    before = bucket.checksum(whole=True)
    assert torch.equal(bucket.checksum(whole=True), before)
    for element in gradient.reshape(-1).tolist():
        where = gradient == element
        gradient.data[where] = 0.9 * element
        assert not torch.equal(bucket.checksum(whole=True), before)
        gradient.data[where] = element
        assert torch.equal(bucket.checksum(whole=True), before)
    gradient.data.neg_()
    assert not torch.equal(bucket.checksum(whole=True), before)


@pytest.mark.parametrize("factor", [0.5, 0.25, 2.0**-10, 2.0, -1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_checksum_shows_a_factor_common_to_all_elements(dtype: torch.dtype, factor: float) -> None:
    """All exponents change by the same amount, so the sum of bits may wrap to the same value."""
    parameter = torch.nn.Parameter(torch.zeros(100, 512, dtype=dtype))
    generator = torch.Generator().manual_seed(0)
    parameter.grad = torch.randn(100, 512, generator=generator).to(dtype)
    parameter.grad[::3] = 0
    bucket = Bucket([parameter])
    bucket.capture_gradients(1.0)
    before, sampled = bucket.checksum(whole=True), bucket.checksum(whole=False)
    parameter.grad.data.mul_(factor)
    assert not torch.equal(bucket.checksum(whole=True), before)
    assert not torch.equal(bucket.checksum(whole=False), sampled)

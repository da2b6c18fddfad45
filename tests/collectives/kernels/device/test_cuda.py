"""The CUDA machine: errors without CuPy, its calls of CuPy, and all of it on a GPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from collectives import SparseVector, kernels
from collectives.kernels import Momentum, device, reference
from collectives.kernels.device import cuda
from tests.collectives import fake_cuda
from tests.collectives.kernels.device import machine_on_host


class OnDevice:
    """Looks like an array of a GPU."""

    __cuda_array_interface__: Any = None


@pytest.fixture
def fresh() -> Iterator[None]:
    """Clear all caches of CuPy objects before and after."""
    for cache in (cuda.cupy, cuda._load):
        cache.cache_clear()
    with mock.patch.object(cuda, "_thread_local", SimpleNamespace()):
        yield
    for cache in (cuda.cupy, cuda._load):
        cache.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_missing_cupy_raises_error_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ImportError, match=r"needs? cupy: pip install cupy-cuda12x"):
        kernels.select(OnDevice(), 1)


def test_importing_device_kernels_does_not_import_cupy() -> None:
    program = "import sys, collectives.kernels.device; print('cupy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def test_numpy_arrays_use_host_kernels_and_gpu_arrays_device_kernels() -> None:
    assert kernels._twin(np.empty(1)) is not device
    assert kernels._twin(OnDevice()) is device


@pytest.fixture
def fake_cupy(fresh: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for CuPy that records what was compiled and launched."""
    launched: list[Any] = []
    compiled: list[Any] = []

    class Module:
        def __init__(self, code: str, options: tuple[str, ...], name_expressions: Any) -> None:
            compiled.append((code, options, name_expressions))

        def get_function(self, name: str) -> Callable[..., None]:
            return lambda *call: launched.append((name, *call))

    state = SimpleNamespace(device=0, stream=7, launched=launched, compiled=compiled)
    processors = {"MultiProcessorCount": 10}
    module = SimpleNamespace(
        RawModule=Module,
        zeros=np.zeros,
        cuda=SimpleNamespace(
            Device=lambda: SimpleNamespace(id=state.device, attributes=processors),
            get_current_stream=lambda: SimpleNamespace(ptr=state.stream),
        ),
    )
    monkeypatch.setitem(sys.modules, "cupy", module)
    return state


def on(number: int) -> Any:
    """Return a stand-in for an array of this device."""
    return SimpleNamespace(device=SimpleNamespace(id=number))


def test_kernel_is_compiled_once_and_launched_with_its_arguments(fake_cupy: Any) -> None:
    machine = cuda.CudaMachine()
    array = np.zeros(3, np.float32)
    for _ in range(2):
        machine.launch("find_nonfinite<float>", 4, array, None, np.uint64(3))
    ((code, options, names),) = fake_cupy.compiled
    assert "void find_nonfinite(" in code
    assert "--fmad=false" in options
    assert names == ("find_nonfinite<float>",)
    (name, grid, block, arguments), again = fake_cupy.launched
    assert (name, grid, block) == ("find_nonfinite<float>", (4,), (256,))
    assert arguments[0] is array
    assert arguments[1:] == (0, 3)
    assert arguments[1].nbytes == 8  # a null pointer
    assert again[0] == name


def test_each_stream_has_its_own_scratch(fake_cupy: Any) -> None:
    mine = cuda.scratch(on(0))
    assert cuda.scratch(on(0)) is mine
    fake_cupy.stream = 8
    assert cuda.scratch(on(0)) is not mine
    fake_cupy.stream = 7
    assert cuda.scratch(on(0)) is mine


def test_scratch_is_thread_local() -> None:
    # `fake_cupy` replaces the thread's memory; this is the real one.
    cuda._thread_local.seen = True
    others: list[bool] = []
    thread = Thread(target=lambda: others.append(hasattr(cuda._thread_local, "seen")))
    thread.start()
    thread.join()
    del cuda._thread_local.seen
    assert others == [False]


def test_array_of_another_gpu_is_refused(fake_cupy: Any) -> None:
    with pytest.raises(ValueError, match=r"on GPU 1, but GPU 0 .*with cupy\.cuda\.Device\(1\)"):
        cuda.scratch(on(1))


class OutOfMemoryError(Exception):
    """CuPy's pool found no room."""


@pytest.mark.parametrize("kept_by_others", [0, 60, 100])
def test_allocation_is_retried_after_the_streams_library_frees_memory(
    fake_cupy: Any, kept_by_others: int
) -> None:
    allocators, emptied, left = [], [], 100 - kept_by_others

    @contextmanager
    def using_allocator(allocate: Callable[[int], int]) -> Iterator[None]:
        allocators.append(allocate)
        yield
        allocators.pop()

    def allocate(size: int) -> int:
        if size > left:
            raise OutOfMemoryError
        return size

    def free_memory() -> None:
        nonlocal left
        left = 100
        emptied.append(True)

    vars(cuda.cupy().cuda).update(
        Device=nullcontext,
        Stream=SimpleNamespace(from_external=nullcontext),
        get_allocator=lambda: allocate,
        using_allocator=using_allocator,
        memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
    )
    with cuda.on_stream(None, 0, free_memory):
        assert allocators[0](50) == 50
        assert len(emptied) == (kept_by_others > 50)
        with pytest.raises(OutOfMemoryError):
            allocators[0](101)
    assert not allocators


def test_on_stream_makes_another_librarys_stream_current_in_cupy(fake_cupy: Any) -> None:
    entered: list[int] = []

    @contextmanager
    def from_external(of: Any) -> Iterator[None]:
        version, address = of.__cuda_stream__()
        assert version == 0
        entered.append(address)
        yield
        entered.pop()

    vars(cuda.cupy().cuda).update(
        Device=nullcontext,
        Stream=SimpleNamespace(from_external=from_external),
        get_allocator=lambda: None,
        using_allocator=nullcontext,
    )
    with cuda.on_stream(4711, 1, lambda: None):
        assert entered == [4711]
    assert entered == []


def same(got: SparseVector, expected: SparseVector) -> bool:
    return (
        got.indices.get().tolist() == expected.indices.tolist()
        and got.values.get().tobytes() == expected.values.tobytes()
    )


def check_public_functions(cupy: Any, random: np.random.Generator, length: int, k: int) -> None:
    residual, velocity = np.zeros((2, length), np.float32)
    held, held_velocity = cupy.zeros(length, np.float32), cupy.zeros(length, np.float32)
    threshold = 0.0
    for _ in range(5):
        gradient = random.standard_normal(length).astype(np.float32)
        expected, _ = reference.accumulate_and_select(
            residual, gradient, k, momentum=Momentum(velocity, 0.9)
        )
        picked, threshold = kernels.accumulate_and_select(
            held, cupy.asarray(gradient), k, threshold, Momentum(held_velocity, 0.9)
        )
        assert same(picked, expected)
        reference.clear_at(residual, expected.indices)
        kernels.clear_at(held, picked.indices)
        assert held.get().tobytes() == residual.tobytes()
    other, _ = reference.select(random.standard_normal(length).astype(np.float32), k)
    theirs = SparseVector(cupy.asarray(other.indices), cupy.asarray(other.values), length)
    assert same(kernels.merge(picked, theirs, k), reference.merge(expected, other, k))
    assert same(
        kernels.sum_by_index([picked, theirs, picked]),
        reference.sum_by_index([expected, other, expected]),
    )
    assert kernels.squared_norm(held) == reference.squared_norm(residual)
    assert kernels.all_finite(held)


def test_public_functions_on_a_modelled_gpu_equal_the_reference(
    monkeypatch: pytest.MonkeyPatch, shared_folder: Path, random: np.random.Generator
) -> None:
    library = machine_on_host.build(shared_folder / "kernels", cuda.THREADS)
    with fake_cuda.with_kernels(monkeypatch, library, gpus=1):
        check_public_functions(cuda.cupy(), random, 20_003, 50)


# ---- on a GPU


@pytest.fixture
def cupy(on_gpu: Any) -> Any:
    return cuda.cupy()


@pytest.mark.gpu
def test_public_functions_on_gpu_equal_the_reference(
    cupy: Any, random: np.random.Generator
) -> None:
    check_public_functions(cupy, random, 1_000_003, 1000)


@pytest.mark.gpu
def test_cupy_pool_gets_memory_that_torch_has_cached(cupy: Any) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU here")
    cupy.get_default_memory_pool().free_all_blocks()
    free, _ = torch.cuda.mem_get_info()
    cached = torch.empty(free * 7 // 10, dtype=torch.uint8, device="cuda")
    del cached  # torch keeps it
    stream = torch.cuda.current_stream()
    with cuda.on_stream(stream.cuda_stream, stream.device_index, torch.cuda.empty_cache):
        assert cupy.empty(free // 2, np.uint8).size == free // 2
    cupy.get_default_memory_pool().free_all_blocks()


@pytest.mark.gpu
def test_sparse_vector_accepts_cupy_arrays(cupy: Any) -> None:
    dense = cupy.asarray([0, 2, 0, -1], np.float32)
    vector = SparseVector.from_dense(dense)
    assert vector.to_dense().get().tolist() == [0, 2, 0, -1]
    assert vector.where(vector.values > 0).indices.get().tolist() == [1]
    assert SparseVector.empty(4, like=dense).to_dense().get().tolist() == [0] * 4

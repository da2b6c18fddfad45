"""GPU vectors are reduced like host vectors, on a model of CUDA (fake_cuda.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from collectives import SparseVector, Transport, reduce, run_ranks
from collectives.errors import NonFiniteError
from collectives.transports import local_world
from collectives.transports.nccl import NcclTransport
from collectives.transports.staged import StagedTransport
from collectives.wire import EXACT, Format
from tests.collectives.algorithms.worlds import (
    FORMATS,
    VARIANTS,
    Outcome,
    assert_nothing_is_lost,
    integer_picks,
    random_picks,
    run,
    same_bits,
)

TRANSPORTS: dict[str, Callable[[Transport], Transport]] = {
    "hosts": lambda host: host,
    "staged": StagedTransport,
}
SIZES = [1, 2, 3, 6]
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def reduce_on_gpus(
    variant: str,
    picks: Sequence[SparseVector],
    k: int,
    format: Format = EXACT,
    over: str = "hosts",
    host_ranks: Sequence[int] = (),
) -> list[Outcome]:
    """Return every rank's result for a vector on its own GPU, copied to the host."""
    algorithm, usual = VARIANTS[variant]
    options = usual(len(picks), k, picks[0].length)

    def rank(host: Transport) -> Outcome:
        cuda = import_module("cupy").cuda
        selected = picks[host.rank]
        with cuda.Device(host.rank):
            transport = NcclTransport(host) if over == "nccl" else TRANSPORTS[over](host)
            if host.rank not in host_ranks:
                selected = selected.beside(cuda_array())
        # Set another current device: the reduction must use the vector's own.
        with cuda.Device(7):
            outcome = reduce(selected, k, transport, algorithm, format=format, **options)
        for vector in outcome:
            assert type(vector.values) is type(vector.indices) is type(selected.values)
            if host.rank not in host_ranks:
                assert vector.values.device.id == vector.indices.device.id == host.rank
        update, returned = outcome
        with cuda.Device(host.rank):
            return update.on_host(), returned.on_host()

    return run_ranks(local_world(len(picks), timeout_seconds=30), rank)


def cuda_array() -> Any:
    return import_module("cupy").empty(0, np.float32)


@every_variant
@pytest.mark.parametrize("over", TRANSPORTS)
@pytest.mark.parametrize("size", SIZES)
def test_gpu_vectors_reduce_to_the_same_bits_as_host_vectors(
    cuda: Any, variant: str, over: str, size: int, random: np.random.Generator
) -> None:
    picks = random_picks(random, size, 300, 20)
    assert same_bits(reduce_on_gpus(variant, picks, 20, over=over), run(variant, picks, 20))


@every_variant
@pytest.mark.parametrize("format", FORMATS, ids="-".join)
def test_gpu_vectors_reduce_to_the_same_bits_as_host_vectors_in_every_format(
    cuda: Any, variant: str, format: Format, random: np.random.Generator
) -> None:
    picks = random_picks(random, 3, 300, 20, np.float64)
    outcomes = reduce_on_gpus(variant, picks, 20, format)
    assert same_bits(outcomes, run(variant, picks, 20, format))
    assert_nothing_is_lost(picks, outcomes, additions=4 * 3)


@every_variant
def test_nccl_reduces_formats_without_gpu_kernels_to_the_hosts_bits(
    cuda: Any, variant: str, random: np.random.Generator
) -> None:
    format = Format("packed", "bf16")
    picks = random_picks(random, 3, 300, 20)
    outcomes = reduce_on_gpus(variant, picks, 20, format, "nccl")
    assert same_bits(outcomes, run(variant, picks, 20, format))


@every_variant
def test_ranks_with_and_without_a_gpu_reduce_together(
    cuda: Any, variant: str, random: np.random.Generator
) -> None:
    picks = integer_picks(random, 5, 300, 20)
    outcomes = reduce_on_gpus(variant, picks, 20, host_ranks=[1, 4])
    assert same_bits(outcomes, run(variant, picks, 20))
    before = np.sum([pick.to_dense() for pick in picks], axis=0)
    after = outcomes[0][0].to_dense() + sum(returned.to_dense() for _, returned in outcomes)
    assert after.tolist() == before.tolist()


def test_each_gpu_vector_is_copied_to_the_host_and_back_once(
    cuda: Any, random: np.random.Generator
) -> None:
    picks = random_picks(random, 4, 300, 20)
    expected = run("gtopk", picks, 20)
    on_gpu: list[SparseVector] = []
    for rank, pick in enumerate(picks):
        with import_module("cupy").cuda.Device(rank):
            on_gpu.append(pick.beside(cuda_array()))
    cuda.copies.clear()
    run_ranks(local_world(4), lambda t: reduce(on_gpu[t.rank], 20, t))
    copies: Counter[tuple[str, int, int]] = Counter()
    for rank, (pick, outcome) in enumerate(zip(picks, expected, strict=True)):
        copies.update([("down", rank, array.nbytes) for array in pick[:2]])
        copies.update([("up", rank, array.nbytes) for vector in outcome for array in vector[:2]])
    assert Counter(cuda.copies) == copies


@every_variant
def test_non_finite_value_raises_error_that_names_its_rank(cuda: Any, variant: str) -> None:
    picks = [
        SparseVector(np.arange(3, dtype=np.int32), np.ones(3, np.float32), 9) for _ in range(3)
    ]
    picks[1].values[2] = np.nan
    with pytest.raises(NonFiniteError, match="rank 1") as raised:
        reduce_on_gpus(variant, picks, 3)
    assert raised.value.rank == 1


def test_indices_out_of_order_are_refused(cuda: Any) -> None:
    falling = SparseVector(np.array([4, 2], np.int32), np.ones(2, np.float32), 9)
    with pytest.raises(ValueError, match="strictly increasing, got 4 before 2"):
        reduce_on_gpus("gtopk", [falling], 3)


@pytest.mark.gpu
@every_variant
@pytest.mark.parametrize("size", SIZES)
def test_real_gpu_vectors_reduce_to_the_same_bits_as_host_vectors(
    variant: str, size: int, random: np.random.Generator
) -> None:
    cupy = pytest.importorskip("cupy")
    if not cupy.cuda.is_available():
        pytest.skip("needs a GPU")
    picks = random_picks(random, size, 3000, 200)
    algorithm, usual = VARIANTS[variant]
    options = usual(size, 200, 3000)

    def rank(transport: Transport) -> Outcome:
        selected = picks[transport.rank].beside(cupy.empty(0))
        update, returned = reduce(selected, 200, transport, algorithm, **options)
        assert isinstance(update.values, cupy.ndarray)
        assert isinstance(returned.values, cupy.ndarray)
        return update.on_host(), returned.on_host()

    assert same_bits(run_ranks(local_world(size), rank), run(variant, picks, 200))

"""Vectors of GPUs are reduced on the GPUs over NCCL: the CUDA kernels, on a model of the rest.

The model is fake_cuda.py: data used before it is ready is garbage. The kernels are the library's
own, compiled for the host.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collectives import SparseVector, Transport, reduce, run_ranks
from collectives.algorithms import ON_DEVICE
from collectives.errors import MessageError, NonFiniteError
from collectives.kernels.device import cuda as cuda_machine
from collectives.transports import LocalTransport, local_world
from collectives.transports.nccl import NcclTransport
from collectives.vector import check
from collectives.wire import EXACT, HEADER_BYTES, Format, decode, encode
from collectives.wire.format import ON_DEVICE as FORMATS_ON_DEVICE
from tests.collectives import fake_cuda
from tests.collectives.algorithms.worlds import (
    VARIANTS,
    Outcome,
    assert_nothing_is_lost,
    bits,
    integer_picks,
    random_picks,
    run,
    same_bits,
)
from tests.collectives.kernels.device import machine_on_host

ON_DEVICE_VARIANTS = [
    variant for variant, (algorithm, _) in VARIANTS.items() if algorithm in ON_DEVICE
]
SIZES = [1, 2, 3, 6]
CODED = sorted(FORMATS_ON_DEVICE - {EXACT})
# The host may copy at most this many bytes: a header and its checksum, or a selection's outcome.
MOST_BYTES = 128


@pytest.fixture(scope="session")
def library(shared_folder: Path) -> Any:
    """The CUDA kernels, compiled for the host."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ here to compile the kernels for the host with")
    return machine_on_host.build(shared_folder / "kernels", cuda_machine.THREADS)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch, library: Any) -> Iterator[Any]:
    """A modelled machine with 8 GPUs; the test fails if the model detects an error."""
    with fake_cuda.with_kernels(monkeypatch, library) as cuda:
        yield cuda


def copy_to_gpu(vector: SparseVector) -> SparseVector:
    return vector.beside(import_module("cupy").empty(0, np.float32))


def reduce_on_gpus(
    variant: str, picks: Sequence[SparseVector], k: int, cuda: Any, format: Format = EXACT
) -> list[Outcome]:
    """Return every rank's result over NCCL; `cuda.copies` has only the reduction's copies."""
    algorithm, usual = VARIANTS[variant]
    options = usual(len(picks), k, picks[0].length)
    held: list[Any] = [None] * len(picks)

    def prepare(host: Transport) -> NcclTransport:
        with import_module("cupy").cuda.Device(host.rank):
            held[host.rank] = copy_to_gpu(picks[host.rank])
            return NcclTransport(host, timeout_seconds=30)

    world = local_world(len(picks), timeout_seconds=60)
    transports = run_ranks(world, prepare)
    cuda.copies.clear()
    outcomes = run_ranks(
        world,
        lambda host: reduce(
            held[host.rank], k, transports[host.rank], algorithm, format=format, **options
        ),
    )
    copies = list(cuda.copies)
    on_host = []
    for rank, outcome in enumerate(outcomes):
        with import_module("cupy").cuda.Device(rank):
            assert {vector.values.device.id for vector in outcome} == {rank}
            update, returned = outcome
            on_host.append((update.on_host(), returned.on_host()))
    cuda.copies[:] = copies
    return on_host


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("size", SIZES)
def test_gpu_vectors_over_nccl_reduce_to_the_hosts_bits(
    cuda: Any, variant: str, size: int, random: np.random.Generator
) -> None:
    # Integers, because NCCL sums dense vectors in an unknown order.
    picks = integer_picks(random, size, 300, 40)
    outcomes = reduce_on_gpus(variant, picks, 40, cuda)
    assert same_bits(outcomes, run(variant, picks, 40))


def test_host_waits_for_the_gpu_at_most_five_times_a_round(
    cuda: Any, random: np.random.Generator
) -> None:
    def cost(size: int) -> tuple[int, int]:
        picks = integer_picks(random, size, 3000, 900)
        held: list[Any] = [None] * size

        def prepare(host: Transport) -> NcclTransport:
            with import_module("cupy").cuda.Device(host.rank):
                held[host.rank] = copy_to_gpu(picks[host.rank])
                return NcclTransport(host, timeout_seconds=30)

        world = local_world(size, timeout_seconds=60)
        transports = run_ranks(world, prepare)
        cuda.copies.clear()
        cuda.launches.clear()
        run_ranks(world, lambda host: reduce(held[host.rank], 900, transports[host.rank]))
        waits = sum(kind == "down" for kind, *_ in cuda.copies)
        return waits // size, len(cuda.launches) // size

    (waits_of_one, launches_of_one), (waits, launches) = cost(2), cost(4)
    # The cost of the second of two rounds.
    assert waits - waits_of_one <= 5
    assert launches - launches_of_one <= 24


@pytest.mark.parametrize("variant", ON_DEVICE_VARIANTS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_nothing_is_lost_and_no_entries_are_copied_to_the_host(
    cuda: Any, variant: str, dtype: type, random: np.random.Generator
) -> None:
    k = 41  # odd: float64 needs padding
    picks = random_picks(random, 5, 500, k, dtype)
    outcomes = reduce_on_gpus(variant, picks, k, cuda)
    assert_nothing_is_lost(picks, outcomes, additions=2 * len(picks))
    assert len({bits(update) for update, _ in outcomes}) == 1
    assert outcomes[0][0].entries > 0
    assert max(count for _, _, count in cuda.copies) <= MOST_BYTES < 4 * k


@pytest.mark.parametrize("format", CODED, ids="-".join)
@pytest.mark.parametrize("variant", ON_DEVICE_VARIANTS)
def test_coded_vectors_are_reduced_without_copies_to_the_host(
    cuda: Any, variant: str, format: Format, random: np.random.Generator
) -> None:
    k = 41
    picks = random_picks(random, 5, 100_000, k)  # two blocks
    outcomes = reduce_on_gpus(variant, picks, k, cuda, format)
    if VARIANTS[variant][0] != "dense":  # NCCL sums in an unknown order
        assert same_bits(outcomes, run(variant, picks, k, format))
    assert_nothing_is_lost(picks, outcomes, additions=2 * len(picks))
    assert max(count for _, _, count in cuda.copies) <= MOST_BYTES < 4 * k


@pytest.mark.parametrize("format", [Format("packed"), Format("raw", "int8")], ids="-".join)
def test_formats_without_gpu_kernels_are_reduced_on_the_host(
    cuda: Any, format: Format, random: np.random.Generator
) -> None:
    picks = random_picks(random, 3, 300, 40)
    assert same_bits(
        reduce_on_gpus("gtopk", picks, 40, cuda, format), run("gtopk", picks, 40, format)
    )


@pytest.mark.parametrize("variant", ON_DEVICE_VARIANTS)
def test_non_finite_value_raises_error_that_names_its_rank(cuda: Any, variant: str) -> None:
    picks = [
        SparseVector(np.arange(3, dtype=np.int32), np.ones(3, np.float32), 9) for _ in range(3)
    ]
    picks[1].values[2] = np.inf
    with pytest.raises(NonFiniteError, match="rank 1"):
        reduce_on_gpus(variant, picks, 3, cuda)


@pytest.mark.parametrize("algorithm", ["gtopk-tree", "gtopk"])
def test_gpu_and_host_vectors_mixed_over_nccl_are_refused(
    cuda: Any, algorithm: str, random: np.random.Generator
) -> None:
    picks = random_picks(random, 2, 300, 20)

    def rank(host: Transport) -> None:
        with import_module("cupy").cuda.Device(host.rank):
            transport = NcclTransport(host, timeout_seconds=30)
            selected = picks[host.rank]
            reduce(copy_to_gpu(selected) if host.rank else selected, 20, transport, algorithm)

    with pytest.raises(MessageError, match="or none"):
        run_ranks(local_world(2, timeout_seconds=30), rank)


@pytest.mark.parametrize("variant", ON_DEVICE_VARIANTS)
def test_empty_gpu_vectors_are_reduced(cuda: Any, variant: str) -> None:
    empty = SparseVector.empty(9)
    picks = [empty, SparseVector(np.array([4], np.int32), np.ones(1, np.float32), 9), empty]
    assert same_bits(reduce_on_gpus(variant, picks, 3, cuda), run(variant, picks, 3))
    picks = [empty] * 3
    assert same_bits(reduce_on_gpus(variant, picks, 3, cuda), run(variant, picks, 3))


# ---- many ranks on one GPU, a real one if available


class OneGpu(LocalTransport):
    """A rank of a world of threads that share one GPU; messages stay in its memory."""

    sends_from_device = True

    def send_on(self, stream: Transport, message: Any, to: int) -> Callable[[], None]:
        self._mailboxes[to].put(stream.tag, self.rank, message.copy())
        return lambda: None


def reduce_on_one_gpu(variant: str, picks: Sequence[SparseVector], k: int) -> list[Outcome]:
    algorithm, usual = VARIANTS[variant]
    options = usual(len(picks), k, picks[0].length)

    def rank(transport: LocalTransport) -> Outcome:
        selected = copy_to_gpu(picks[transport.rank])
        update, returned = reduce(selected, k, transport, algorithm, **options)
        assert type(update.values) is type(returned.values) is type(selected.values)
        return update.on_host(), returned.on_host()

    return run_ranks(local_world(len(picks), 30, kind=OneGpu), rank)


# The others ask NCCL for its collectives.
PAIRWISE = [variant for variant in ON_DEVICE_VARIANTS if VARIANTS[variant][0].startswith("gtopk")]


@pytest.mark.parametrize("variant", PAIRWISE)
def test_ranks_that_share_a_gpu_reduce_to_the_hosts_bits(
    cuda: Any, variant: str, random: np.random.Generator
) -> None:
    picks = random_picks(random, 3, 300, 20, np.float64)
    assert same_bits(reduce_on_one_gpu(variant, picks, 20), run(variant, picks, 20))


@pytest.fixture
def real_gpu() -> Any:
    """CuPy, with a GPU."""
    cupy = pytest.importorskip("cupy")
    if not cupy.cuda.is_available():
        pytest.skip("needs a GPU")
    return cupy


@pytest.mark.gpu
@pytest.mark.parametrize("variant", PAIRWISE)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_ranks_that_share_a_real_gpu_reduce_to_the_hosts_bits(
    real_gpu: Any, variant: str, size: int, dtype: type, random: np.random.Generator
) -> None:
    picks = random_picks(random, size, 20_000, 801, dtype)
    assert same_bits(reduce_on_one_gpu(variant, picks, 801), run(variant, picks, 801))


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ON_DEVICE_VARIANTS)
def test_single_rank_reduces_to_the_hosts_bits_over_real_nccl(
    real_gpu: Any, variant: str, random: np.random.Generator
) -> None:
    picks = random_picks(random, 1, 20_000, 801)
    algorithm, usual = VARIANTS[variant]
    transport = NcclTransport(local_world(1)[0], timeout_seconds=60)
    update, returned = reduce(
        copy_to_gpu(picks[0]), 801, transport, algorithm, **usual(1, 801, 20_000)
    )
    transport.leave("done")
    assert same_bits([(update.on_host(), returned.on_host())], run(variant, picks, 801))


# ---- the wire


def vector(random: np.random.Generator, entries: int, dtype: type) -> SparseVector:
    indices = np.sort(random.choice(9000, entries, replace=False)).astype(np.int32)
    return SparseVector(indices, random.standard_normal(entries).astype(dtype), 9000)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("entries", [0, 1, 2, 601])
@pytest.mark.parametrize("extra", [0, 1, 13])
def test_gpu_encodes_the_same_bytes_as_the_host(
    cuda: Any, entries: int, extra: int, dtype: type, random: np.random.Generator
) -> None:
    for format in sorted(FORMATS_ON_DEVICE):
        check_bytes(vector(random, entries, dtype), extra, random, format)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("entries", [0, 1, 2, 601])
@pytest.mark.parametrize("extra", [0, 1, 13])
def test_real_gpu_encodes_the_same_bytes_as_the_host(
    real_gpu: Any, entries: int, extra: int, dtype: type, random: np.random.Generator
) -> None:
    for format in sorted(FORMATS_ON_DEVICE):
        check_bytes(vector(random, entries, dtype), extra, random, format)


def test_gpu_encodes_a_message_without_copies_to_the_host(
    cuda: Any, random: np.random.Generator
) -> None:
    held = copy_to_gpu(vector(random, 601, np.float32))
    cuda.copies.clear()
    encode(held, 700)
    assert [copy for copy in cuda.copies if copy[0] == "down"] == []
    assert max(count for _, _, count in cuda.copies) <= HEADER_BYTES


def check_bytes(
    picks: SparseVector, extra: int, random: np.random.Generator, format: Format
) -> None:
    extra_content = random.integers(0, 256, extra, np.uint8)
    expected = encode(picks, 700, format, extra=extra_content, refused_by=2)
    held = copy_to_gpu(picks)
    encoded = encode(held, 700, format, extra=extra_content, refused_by=2)
    assert encoded.message.get().tobytes() == expected.message.tobytes()
    assert bits(encoded.vector.on_host()) == bits(expected.vector)
    decoded = decode(encoded.message, held, 700, 0, format, extra_bytes=extra)
    assert bits(decoded.vector.on_host()) == bits(expected.vector)
    assert decoded.extra.get().tolist() == extra_content.tolist()
    assert decoded.refused_by == 2


def test_gpu_decodes_a_message_at_any_offset_in_a_buffer(
    cuda: Any, random: np.random.Generator
) -> None:
    check_every_offset(vector(random, 30, np.float32))


@pytest.mark.gpu
def test_real_gpu_decodes_a_message_at_any_offset_in_a_buffer(
    real_gpu: Any, random: np.random.Generator
) -> None:
    check_every_offset(vector(random, 30, np.float32))


def check_every_offset(picks: SparseVector) -> None:
    message = encode(picks, 30).message
    for start in range(9):
        padded = np.concatenate([np.zeros(start, np.uint8), message])
        larger = import_module("cupy").asarray(padded)
        assert bits(decode(larger[start:], copy_to_gpu(picks), 30, 0).vector.on_host()) == bits(
            picks
        )


@pytest.mark.parametrize("format", sorted(FORMATS_ON_DEVICE), ids="-".join)
def test_gpu_decoder_detects_damage_anywhere_in_a_message(
    cuda: Any, format: Format, random: np.random.Generator
) -> None:
    picks = vector(random, 30, np.float32)
    message = encode(picks, 30, format).message
    like = copy_to_gpu(picks)
    for place in [0, 5, 17, 56, HEADER_BYTES, (HEADER_BYTES + message.size) // 2, message.size - 1]:
        damaged = message.copy()
        damaged[place] ^= 64
        with pytest.raises(MessageError, match="from rank 3 is malformed"):
            decode(import_module("cupy").asarray(damaged), like, 30, 3, format)
    for size in [0, 63, 64, message.size - 1]:
        with pytest.raises(MessageError, match="from rank 3 is malformed"):
            decode(import_module("cupy").asarray(message[:size]), like, 30, 3, format)


@pytest.mark.parametrize("format", [EXACT, Format("blocks")], ids="-".join)
def test_gpu_decoder_refuses_indices_out_of_order(cuda: Any, format: Format) -> None:
    falling = SparseVector(np.array([4, 2], np.int32), np.ones(2, np.float32), 9)
    message = encode(falling, 3, format).message
    with pytest.raises(MessageError, match="strictly increasing"):
        decode(import_module("cupy").asarray(message), copy_to_gpu(falling), 3, 0, format)


INVALID = {
    "increasing, got 4 before 2": ([1, 4, 2], [1, 1, 1]),
    r"in 0\.\.8, got -1\.\.7": ([-1, 7], [1, 1]),
}


@pytest.mark.parametrize("text", INVALID)
def test_check_quotes_the_entries_of_an_invalid_gpu_vector(cuda: Any, text: str) -> None:
    check_refusal(text)


@pytest.mark.gpu
@pytest.mark.parametrize("text", INVALID)
def test_check_quotes_the_entries_of_an_invalid_vector_on_a_real_gpu(
    real_gpu: Any, text: str
) -> None:
    check_refusal(text)


def check_refusal(text: str) -> None:
    indices, values = INVALID[text]
    vector = copy_to_gpu(SparseVector(np.array(indices, np.int32), np.array(values, np.float32), 9))
    with pytest.raises(ValueError, match=text):
        check(vector)

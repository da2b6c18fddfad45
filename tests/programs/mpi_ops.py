"""Run on any number of ranks: every collective's result is computed from rank and size.

Argument: an empty folder that all ranks see.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import light_torch  # noqa: F401

import torch
from checks import (
    check_close,
    check_that_the_job_goes_on,
    raises,
    run_tests,
    same_bits_everywhere,
    same_everywhere,
)

import gtopk.torch as hvd

FOLDER = Path(sys.argv[1])
REDUCTIONS = ("Average", "Sum", "Min", "Max", "Product")
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_that_nothing_works() -> None:
    assert (hvd.is_initialized(), hvd.mpi_enabled(), hvd.gloo_enabled()) == (False,) * 3
    ones = torch.ones(2)
    for call in (
        hvd.rank,
        hvd.size,
        hvd.local_rank,
        hvd.local_size,
        hvd.cross_rank,
        hvd.cross_size,
        hvd.mpi_ops.is_homogeneous,
        hvd.mpi_threads_supported,
        lambda: hvd.start_timeline("trace.json"),
        hvd.stop_timeline,
        hvd.barrier,
        hvd.join,
        lambda: hvd.add_process_set([0]),
        lambda: hvd.allreduce(ones),
        lambda: hvd.allreduce_(ones),
        lambda: hvd.allreduce_async(ones),
        lambda: hvd.allgather(ones),
        lambda: hvd.alltoall(ones),
        lambda: hvd.reducescatter(ones),
        lambda: hvd.grouped_allreduce([ones]),
        lambda: hvd.sparse_allreduce_async(ones.to_sparse(), "x", hvd.Sum),
        lambda: hvd.broadcast(ones, 0),
        lambda: hvd.broadcast_async_(ones, 0),
    ):
        for kind in (ValueError, hvd.HorovodInternalError):  # Horovod raises either of them
            raises(kind, call, "has not been initialized", "hvd.init()")
    assert ones.tolist() == [1, 1]


check_that_nothing_works()
hvd.init()
hvd.init()  # harmless
RANK, SIZE = hvd.rank(), hvd.size()
RANKS = range(SIZE)
ODD = SIZE - 1  # the rank that differs when ranks disagree


def small(rank: int, dtype: torch.dtype, shape: tuple[int, ...] = (3, 7)) -> torch.Tensor:
    """Return a rank's integers; they, their sums and their products are exact in every dtype."""
    flat = (torch.arange(math.prod(shape)) * (rank + 1) + rank) % 5
    return (flat if dtype == torch.uint8 else flat - 2).reshape(shape).to(dtype)


def reduced(reduction: str, dtype: torch.dtype) -> torch.Tensor:
    """Return the expected reduction of every rank's `small`."""
    every = torch.stack([small(rank, dtype).double() for rank in RANKS])
    if reduction == "Average":
        mean = every.sum(0) / SIZE
        return (mean if dtype.is_floating_point else mean.trunc()).to(dtype)
    reduce: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "Sum": lambda rows: rows.sum(0),
        "Min": lambda rows: rows.amin(0),
        "Max": lambda rows: rows.amax(0),
        "Product": lambda rows: rows.prod(0),
    }
    return reduce[reduction](every).to(dtype)


def test_ranks_know_rank_size_and_local_rank() -> None:
    assert hvd.is_initialized() is True
    assert hvd.allgather(torch.tensor([[RANK, SIZE]])).tolist() == [[r, SIZE] for r in RANKS]
    # All on one host.
    assert (hvd.local_rank(), hvd.local_size()) == (RANK, SIZE)
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)


def test_allreduce_computes_every_reduction_of_every_dtype() -> None:
    for dtype in (*INTEGERS, *FLOATS):
        for reduction in REDUCTIONS:
            tensor, expected = small(RANK, dtype), reduced(reduction, dtype)
            op = getattr(hvd, reduction)
            result = hvd.allreduce(tensor, op=op)
            check_close(result, expected, (reduction, dtype))
            assert torch.equal(tensor, small(RANK, dtype)), "the argument changed"
            assert result is not tensor
            assert hvd.allreduce_(tensor, op=op) is tensor
            assert torch.equal(tensor, result)
            assert same_bits_everywhere(result)


def test_allreduce_averages_by_default() -> None:
    tensor = torch.full((2,), float(RANK))
    check_close(hvd.allreduce(tensor), torch.full((2,), (SIZE - 1) / 2))
    check_close(hvd.allreduce_(tensor), torch.full((2,), (SIZE - 1) / 2))


def test_allreduce_averages_integers_toward_zero() -> None:
    # Only one rank contributes, so that the average lies between two integers.
    for dtype in (torch.int8, torch.int32, torch.int64):
        tensor = torch.tensor([7, -7, SIZE - 1, 1 - SIZE, 0]) * (RANK == ODD)
        expected = [7 // SIZE, -(7 // SIZE), (SIZE - 1) // SIZE, -((SIZE - 1) // SIZE), 0]
        assert hvd.allreduce(tensor.to(dtype)).tolist() == expected
    # Too large for float64.
    large = 2**60 + 1
    tensor = torch.tensor([large, -large]) * (RANK == ODD)
    assert hvd.allreduce(tensor).tolist() == [large // SIZE, -(large // SIZE)]
    assert hvd.allreduce(tensor, op=hvd.Sum).tolist() == [large, -large]


def test_allreduce_applies_prescale_and_postscale_factors() -> None:
    every = torch.stack([small(rank, torch.float64) for rank in RANKS])
    for dtype in FLOATS:
        result = hvd.allreduce(
            small(RANK, dtype), op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0
        )
        check_close(result, (every.sum(0) * 2).to(dtype), dtype)
        result = hvd.allreduce_(small(RANK, dtype), prescale_factor=2.0, postscale_factor=0.25)
        check_close(result, (every.sum(0) / SIZE * 0.5).to(dtype), dtype)
        result = hvd.allreduce(small(RANK, dtype), op=hvd.Max, prescale_factor=-1.0)
        check_close(result, (-every).amax(0).to(dtype), dtype)
    one = 1 if RANK == 0 else 1.0  # the same factor, whatever its type
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, prescale_factor=one).item() == SIZE
    result = hvd.allreduce(
        small(RANK, torch.int32), op=hvd.Sum, prescale_factor=0.5, postscale_factor=1.5
    )
    expected = ((every * 0.5).trunc().sum(0) * 1.5).trunc()
    check_close(result, expected.to(torch.int32))


def test_prescaled_float16_does_not_overflow() -> None:
    tensor = torch.full((2,), 60000.0, dtype=torch.float16)
    result = hvd.allreduce(tensor, op=hvd.Sum, prescale_factor=1 / SIZE)
    check_close(result, tensor)


def test_allreduce_results_are_bit_identical_on_all_ranks() -> None:
    # Above 1 MiB MPI uses another allreduce; float16 uses gtopk's own.
    for dtype, length in (
        (torch.float32, 300_001),
        (torch.float64, 1_001),
        (torch.float32, 1_001),
        (torch.float16, 1_001),
        (torch.bfloat16, 1_001),
        (torch.float32, 1),
        (torch.float32, 0),
    ):
        every = [
            torch.randn(length, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
            for rank in RANKS
        ]
        result = hvd.allreduce(every[RANK].to(dtype), op=hvd.Sum)
        expected = sum(tensor.to(dtype).double() for tensor in every)
        step = torch.finfo(dtype).eps
        error = (result.double() - expected).abs()
        assert bool((error <= 8 * SIZE * step).all()), (dtype, length, error.max())
        assert same_bits_everywhere(result), (dtype, length)


def call_with(form: str, *arguments: Any, **options: Any) -> torch.Tensor:
    """Call one of the four forms of allreduce, and return its result."""
    result = getattr(hvd, form)(*arguments, **options)
    return hvd.synchronize(result) if "async" in form else result


def test_deprecated_argument_average_works_and_warns_the_caller() -> None:
    total = float(sum(RANKS))
    for form in ("allreduce", "allreduce_", "allreduce_async", "allreduce_async_"):
        for average, expected in ((True, total / SIZE), (False, total)):
            for arguments, options in (((average,), {}), ((), {"average": average})):
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    tensor = torch.full((2,), float(RANK))
                    result = call_with(form, tensor, *arguments, **options)
                check_close(result, torch.full((2,), expected), form)
                (warning,) = caught
                assert warning.category is DeprecationWarning
                assert "average" in str(warning.message)
                assert "op=" in str(warning.message)
                # Python shows a DeprecationWarning only if it is attributed to the main program.
                assert warning.filename == __file__, form


def test_second_positional_argument_of_allreduce_is_average() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = hvd.allreduce(torch.full((2,), float(RANK)), "loss")
    check_close(result, torch.full((2,), sum(RANKS) / SIZE))
    assert [warning.category for warning in caught] == [DeprecationWarning]


def test_op_and_average_together_are_refused() -> None:
    for form in ("allreduce", "allreduce_", "allreduce_async", "allreduce_async_"):
        for average in (True, False):

            def call(form: str = form, average: bool = average) -> torch.Tensor:
                return call_with(form, torch.ones(1), average=average, op=hvd.Sum)

            raises(ValueError, call, "op", "supersedes average")


def test_unknown_op_is_refused() -> None:
    for op in (17, -1):
        for kind in (ValueError, hvd.HorovodInternalError):
            raises(kind, lambda op=op: hvd.allreduce(torch.ones(1), op=op), "op", "Average")


def test_in_place_operations_change_the_tensor_itself() -> None:
    parameter = torch.nn.Parameter(torch.full((3,), float(RANK)))
    assert hvd.allreduce_(parameter, op=hvd.Sum) is parameter
    assert parameter.tolist() == [sum(RANKS)] * 3
    assert parameter.is_leaf
    assert parameter.requires_grad
    matrix = torch.full((3, 2), float(RANK))
    row = matrix[1]
    assert hvd.synchronize(hvd.allreduce_async_(row, op=hvd.Sum)) is row
    assert matrix.tolist() == [[RANK] * 2, [sum(RANKS)] * 2, [RANK] * 2]
    assert hvd.broadcast_(matrix, ODD) is matrix
    assert hvd.synchronize(hvd.broadcast_async_(row, 0)) is row
    assert matrix.tolist() == [[ODD] * 2, [sum(RANKS)] * 2, [ODD] * 2]


def test_in_place_operations_need_a_contiguous_tensor() -> None:
    tensor = torch.zeros(2, 3).t()
    for call in (
        lambda: hvd.allreduce_(tensor),
        lambda: hvd.allreduce_async_(tensor),
        lambda: hvd.broadcast_(tensor, 0),
        lambda: hvd.broadcast_async_(tensor, 0),
    ):
        assert raises(ValueError, call) == "Tensor is required to be contiguous."


def test_out_of_place_operations_take_any_strides() -> None:
    tensor = small(RANK, torch.float32).t()
    check_close(hvd.allreduce(tensor, op=hvd.Sum), reduced("Sum", torch.float32).t())
    check_close(hvd.broadcast(tensor, ODD), small(ODD, torch.float32).t())
    rows = torch.cat([small(rank, torch.float32).t() for rank in RANKS])
    check_close(hvd.allgather(tensor), rows)


def test_complex_sparse_and_float8_tensors_are_refused() -> None:
    for tensor in (
        torch.ones(2, dtype=torch.complex64),
        torch.ones(2).to_sparse(),
        torch.ones(2).to(torch.float8_e4m3fn),
    ):
        for call in (
            lambda t=tensor: hvd.allreduce(t),
            lambda t=tensor: hvd.allreduce_(t),
            lambda t=tensor: hvd.allgather(t),
            lambda t=tensor: hvd.broadcast(t, 0),
        ):
            raises(ValueError, call, "Tensor type", "is not supported")


def test_nan_of_any_rank_is_the_minimum_and_the_maximum() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for owner, op in itertools.product(RANKS, (hvd.Min, hvd.Max)):
            own = torch.full((SIZE + 1,), float(RANK)).to(dtype)
            if owner == RANK:
                own[-1] = torch.nan
            found = min(RANKS) if op == hvd.Min else max(RANKS)
            expected = torch.tensor([found] * SIZE + [torch.nan]).to(dtype)
            reduced = [
                hvd.allreduce(own, op=op),
                hvd.allreduce_(own.clone(), op=op, postscale_factor=1.0),
                *hvd.grouped_allreduce([own, own], op=op),
            ]
            for tensor in reduced:
                assert torch.equal(tensor.isnan(), expected.isnan()), (dtype, owner)
                assert tensor[:-1].tolist() == expected[:-1].tolist()


def test_operations_in_flight_may_be_synchronized_in_any_order() -> None:
    own = torch.full((2,), float(RANK))
    handles = {
        "sum": hvd.allreduce_async(own, op=hvd.Sum, name="one"),
        "max": hvd.allreduce_async(own, op=hvd.Max, name="two"),
        "rows": hvd.allgather_async(own, name="one"),
        "root": hvd.broadcast_async(own, ODD, name="one"),
        "mean": hvd.allreduce_async(own),
        "in place": hvd.allreduce_async_(own.clone(), op=hvd.Sum),
    }
    hvd.barrier()  # may be called while others are in flight
    assert all(isinstance(handle, int) and handle for handle in handles.values())
    assert len(set(handles.values())) == len(handles)
    results = {what: hvd.synchronize(handles[what]).tolist() for what in reversed(handles)}
    assert results == {
        "sum": [sum(RANKS)] * 2,
        "max": [ODD] * 2,
        "rows": [rank for rank in RANKS for _ in range(2)],
        "root": [ODD] * 2,
        "mean": [sum(RANKS) / SIZE] * 2,
        "in place": [sum(RANKS)] * 2,
    }


def test_poll_turns_true_when_the_operation_ends() -> None:
    handle = hvd.allreduce_async(torch.ones(2), op=hvd.Sum)
    while not hvd.poll(handle):
        time.sleep(0.001)
    assert hvd.synchronize(handle).tolist() == [SIZE, SIZE]


def test_tensor_changed_in_place_is_ready_once_poll_is_true() -> None:
    tensor = torch.full((2,), float(RANK))
    handle = hvd.broadcast_async_(tensor, ODD)
    while not hvd.poll(handle):
        time.sleep(0.001)
    assert tensor.tolist() == [ODD, ODD]
    assert hvd.poll(handle)
    assert hvd.synchronize(handle) is tensor


def test_handle_can_be_synchronized_once() -> None:
    handle = hvd.allreduce_async(torch.ones(2))
    assert hvd.synchronize(handle) is not None
    assert hvd.synchronize(handle) is None
    assert hvd.synchronize(10**9) is None
    for unknown in (handle, 10**9):
        raises(ValueError, lambda h=unknown: hvd.poll(h), f"Handle {unknown} was not created")


def test_name_of_an_operation_in_flight_cannot_be_reused() -> None:
    done = FOLDER / "rank 0 has tried"
    if SIZE > 1 and RANK > 0:
        while not done.exists():  # so rank 0's operation stays in flight
            time.sleep(0.005)
    first = hvd.allreduce_async(torch.ones(2), op=hvd.Sum, name="twice")
    if SIZE > 1 and RANK == 0:
        assert hvd.poll(first) is False
        for call in (
            lambda: hvd.allreduce_async(torch.ones(2), op=hvd.Sum, name="twice"),
            lambda: hvd.allreduce(torch.ones(3), name="twice"),
        ):
            raises(ValueError, call, "allreduce.twice", "same name", "currently being processed")
        # Another kind of operation may use the name.
        gathered = hvd.allgather_async(torch.ones(1), name="twice")
        assert hvd.poll(gathered) is False
        done.touch()
    else:
        gathered = hvd.allgather_async(torch.ones(1), name="twice")
    assert hvd.synchronize(first).tolist() == [SIZE, SIZE]
    assert hvd.synchronize(gathered).tolist() == [1] * SIZE
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum, name="twice").tolist() == [SIZE, SIZE]


def test_allgather_takes_different_row_counts() -> None:
    for rows_of in (lambda rank: rank + 1, lambda rank: SIZE - rank, lambda rank: 2):
        for dtype in (*INTEGERS, *FLOATS, torch.bool):
            parts = [
                torch.full((rows_of(rank), 2, 3), rank + 1, dtype=torch.int64).to(dtype)
                for rank in RANKS
            ]
            result = hvd.allgather(parts[RANK])
            check_close(result, torch.cat(parts), dtype)


def test_allgather_takes_ranks_without_rows() -> None:
    for empty in RANKS:
        parts = [torch.full((0 if rank == empty else 2, 3), float(rank)) for rank in RANKS]
        check_close(hvd.allgather(parts[RANK], name="rows"), torch.cat(parts))
    assert hvd.allgather(torch.empty(0, 3)).shape == (0, 3)
    assert hvd.allgather(torch.empty(0)).shape == (0,)
    # Rows without elements count, too.
    assert hvd.allgather(torch.empty(RANK + 1, 0)).shape == (sum(r + 1 for r in RANKS), 0)


def test_allgather_refuses_scalars() -> None:
    for call in (
        lambda: hvd.allgather(torch.tensor(1.0)),
        lambda: hvd.synchronize(hvd.allgather_async(torch.tensor(1.0))),
    ):
        raises(hvd.HorovodInternalError, call, "allgather", "at least one dimension", "scalar")


def test_broadcast_works_from_every_root() -> None:
    for root in RANKS:
        for dtype in (*INTEGERS, *FLOATS, torch.bool):
            tensor, expected = small(RANK, dtype), small(root, dtype)
            assert torch.equal(hvd.broadcast(tensor, root), expected)
            assert torch.equal(tensor, small(RANK, dtype)), "the argument changed"
            assert hvd.broadcast_(tensor, root) is tensor
            assert torch.equal(tensor, expected)
        assert hvd.broadcast(torch.tensor(RANK), root_rank=root).item() == root
        assert hvd.broadcast(torch.empty(0, 2), root).shape == (0, 2)


def test_broadcast_refuses_a_root_that_is_no_rank() -> None:
    for root in (-1, SIZE, SIZE + 7):
        for call in (
            lambda root=root: hvd.broadcast(torch.ones(1), root),
            lambda root=root: hvd.broadcast_(torch.ones(1), root),
            lambda root=root: hvd.broadcast_async(torch.ones(1), root),
            lambda root=root: hvd.broadcast_async_(torch.ones(1), root),
        ):
            raises(ValueError, call, "root_rank", f"0..{SIZE - 1}", f"got {root}")


def test_barrier_waits_for_every_rank() -> None:
    if RANK == ODD:
        time.sleep(0.2)
    (FOLDER / f"rank {RANK} is there").touch()
    hvd.barrier()
    assert all((FOLDER / f"rank {rank} is there").exists() for rank in RANKS)


def test_allreduce_gradient_is_reduced_with_the_same_options() -> None:
    total = float(sum(rank + 1 for rank in RANKS))
    for options, factor in (
        ({"op": hvd.Sum}, 1.0),
        ({}, 1 / SIZE),
        ({"op": hvd.Sum, "prescale_factor": 0.5, "postscale_factor": 3.0}, 1.5),
        ({"compression": hvd.Compression.fp16}, 1 / SIZE),
        ({"compression": hvd.Compression.bf16}, 1 / SIZE),
    ):
        tensor = torch.ones(2, requires_grad=True)
        (hvd.allreduce(tensor, **options) * (RANK + 1)).sum().backward()
        expected = torch.full((2,), total * factor)
        if "compression" in options:  # rounded to 16 bits, like the shares that it sums
            narrow = options["compression"].compress(expected)[0].dtype
            check_close(tensor.grad.to(narrow), expected.to(narrow), options)
        else:
            check_close(tensor.grad, expected, options)


def test_allgather_gradient_is_the_average_over_own_rows() -> None:
    rows = RANK + 1
    start, everything = sum(range(rows)), sum(rank + 1 for rank in RANKS)
    tensor = torch.ones(rows, 2, requires_grad=True)
    weights = torch.arange(1.0, 2 * everything + 1).reshape(everything, 2)
    (hvd.allgather(tensor) * weights * (RANK + 1)).sum().backward()
    mean = sum(rank + 1 for rank in RANKS) / SIZE
    check_close(tensor.grad, weights[start : start + rows] * mean)


def test_broadcast_gradient_goes_to_the_root() -> None:
    for root in RANKS:
        tensor = torch.ones(2, requires_grad=True)
        (hvd.broadcast(tensor, root) * (RANK + 1)).sum().backward()
        mean = sum(rank + 1 for rank in RANKS) / SIZE
        check_close(tensor.grad, torch.full((2,), mean if root == RANK else 0.0))


def test_allreduce_refuses_a_compression_that_needs_a_residual() -> None:
    raises(
        TypeError,
        lambda: hvd.allreduce(torch.ones(2), compression=hvd.Compression.gtopk(0.5)),
        "needs the residual that DistributedOptimizer keeps",
    )


def test_fp16_and_bf16_compression_round_and_keep_the_dtype() -> None:
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        for dtype in (torch.float32, torch.float64):
            # Lost in 16 bits, otherwise kept.
            tensor = torch.full((2,), 1 + 2.0**-12, dtype=dtype)
            result = hvd.allreduce(tensor, op=hvd.Sum, compression=compression)
            check_close(result, torch.full((2,), float(SIZE), dtype=dtype))
            assert result[0].item() == SIZE
            assert hvd.allreduce(tensor, op=hvd.Max)[0].item() == 1 + 2.0**-12
        whole = torch.tensor([2**40 + RANK])
        result = hvd.allreduce(whole, op=hvd.Max, compression=compression)
        assert result.tolist() == [2**40 + ODD]


def test_bfloat16_sums_beyond_float16_range_in_every_reduction() -> None:
    large = torch.full((3,), 2.0**20)
    for size in (3, 1000):
        tensor = torch.full((SIZE, size), 2.0**20)
        for compression in (hvd.Compression.none, hvd.Compression.bf16):
            for reduce in (hvd.allreduce, hvd.reducescatter):
                result = reduce(tensor, op=hvd.Sum, compression=compression)
                check_close(result, torch.full(result.shape, SIZE * 2.0**20))
        (result,) = hvd.grouped_allreduce(
            [tensor], op=hvd.Product, compression=hvd.Compression.bf16
        )
        check_close(result, tensor**SIZE)
    combined = hvd.allreduce(large, op=hvd.Adasum, compression=hvd.Compression.bf16)
    check_close(combined, large)
    combined = hvd.allreduce(large.bfloat16(), op=hvd.Adasum)
    check_close(combined, large.bfloat16())


def sides(rest: str, odd: str) -> tuple[str, str]:
    """Return the two parts of an error about one rank that disagrees with the rest."""
    others = ", ".join(str(rank) for rank in RANKS if rank != ODD)
    return f"{'rank' if SIZE == 2 else 'ranks'} {others}: {rest}", f"rank {ODD}: {odd}"


def test_operation_signatures_that_differ_are_an_error_quoting_both() -> None:
    if SIZE == 1:
        return
    odd = RANK == ODD
    ones = torch.ones(3)
    cases: list[tuple[Callable[[], object], tuple[str, ...]]] = [
        (
            lambda: hvd.allreduce(ones.double() if odd else ones, name="x"),
            ("allreduce.x", *sides("torch.float32 [3]", "torch.float64 [3]")),
        ),
        (
            lambda: hvd.allreduce(torch.ones(4, 2) if odd else ones, name="x"),
            ("allreduce.x", *sides("torch.float32 [3]", "torch.float32 [4, 2]")),
        ),
        (
            lambda: hvd.allreduce(ones, name="x", op=hvd.Max if odd else hvd.Sum),
            (
                "allreduce.x",
                *sides("torch.float32 [3] op=Sum", "torch.float32 [3] op=Max"),
            ),
        ),
        (
            lambda: hvd.allreduce(ones, name="x", prescale_factor=0.5 if odd else 1.0),
            ("allreduce.x", *sides("", ""), "prescale_factor=1.0 ", "prescale_factor=0.5 "),
        ),
        (
            lambda: hvd.allreduce(ones, name="x", postscale_factor=0.1 if odd else 0.1 + 1e-12),
            ("allreduce.x", *sides("", "")),
        ),
        (
            lambda: hvd.allreduce(
                ones,
                name="x",
                compression=hvd.Compression.fp16 if odd else hvd.Compression.none,
            ),
            ("allreduce.x", *sides("torch.float32 [3]", "torch.float16 [3]")),
        ),
        (
            lambda: hvd.broadcast(ones, ODD if odd else 0, name="x"),
            ("broadcast.x", *sides("", ""), "root_rank=0", f"root_rank={ODD}"),
        ),
        (
            lambda: hvd.broadcast(torch.ones(4) if odd else ones, 0, name="x"),
            ("broadcast.x", *sides("torch.float32 [3]", "torch.float32 [4]")),
        ),
        (
            lambda: hvd.broadcast(ones.int() if odd else ones, 0, name="x"),
            ("broadcast.x", *sides("torch.float32 [3]", "torch.int32 [3]")),
        ),
        (
            lambda: hvd.allgather(torch.ones(2, 5) if odd else torch.ones(2, 4), name="x"),
            ("allgather.x", *sides("torch.float32 [*, 4]", "torch.float32 [*, 5]")),
        ),
        (
            lambda: hvd.allgather(torch.ones(2, 1) if odd else torch.ones(2), name="x"),
            ("allgather.x", *sides("torch.float32 [*]", "torch.float32 [*, 1]")),
        ),
        (
            lambda: hvd.allgather(ones.half() if odd else ones, name="x"),
            ("allgather.x", *sides("torch.float32 [*]", "torch.float16 [*]")),
        ),
        (
            lambda: hvd.allreduce(ones, name="b" if odd else "a"),
            sides("allreduce.a", "allreduce.b"),
        ),
        (
            lambda: hvd.broadcast(ones, 0, name="x") if odd else hvd.allreduce(ones, name="x"),
            sides("allreduce.x", "broadcast.x"),
        ),
        (
            lambda: hvd.barrier() if odd else hvd.allgather(ones),
            sides("allgather.noname.", "barrier.noname."),
        ),
    ]
    for call, parts in cases:
        text = raises(hvd.HorovodInternalError, call, *parts)
        check_that_the_job_goes_on()
        assert same_everywhere(text)


def test_only_the_disputed_operation_fails_and_keeps_its_tensor() -> None:
    if SIZE == 1:
        return
    before, disputed, after = torch.ones(2), torch.full((2 + (RANK == ODD),), 7.0), torch.ones(2)
    handles = [
        hvd.allreduce_async_(tensor, op=hvd.Sum, name=name)
        for name, tensor in (("before", before), ("disputed", disputed), ("after", after))
    ]
    hvd.synchronize(handles[0])
    raises(hvd.HorovodInternalError, lambda: hvd.synchronize(handles[1]), "allreduce.disputed")
    hvd.synchronize(handles[2])
    assert before.tolist() == after.tolist() == [SIZE, SIZE]
    assert set(disputed.tolist()) == {7.0}
    assert hvd.synchronize(handles[1]) is None


def test_shutdown_of_one_rank_does_not_spoil_the_next_world() -> None:
    hvd.shutdown()
    check_that_nothing_works()
    hvd.shutdown()  # harmless
    hvd.init()
    assert (hvd.rank(), hvd.size()) == (RANK, SIZE)
    check_that_the_job_goes_on()
    if SIZE == 1:
        return
    # Rank 0 leaves; the others notice it in unnamed operations, then leave, too.
    if RANK > 0:
        for _ in range(RANK):
            raises(
                hvd.HorovodInternalError,
                lambda: hvd.allreduce(torch.ones(2)),
                "rank 0 left",
                "called shutdown()",
            )
    hvd.shutdown()
    hvd.init()
    check_that_the_job_goes_on()
    hvd.barrier()


if __name__ == "__main__":
    import basics
    import exchanges
    import process_sets

    for checks in (vars(basics), vars(exchanges), vars(process_sets), globals()):
        run_tests(checks)
    hvd.barrier()
    hvd.shutdown()
    check_that_nothing_works()
    print(f"rank {RANK}: every collective does as it says\n", end="", flush=True)

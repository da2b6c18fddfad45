"""Checks for any number of ranks: results of alltoall, reducescatter, groups and sparse tensors.

Imported by mpi_ops.py, after init.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import light_torch  # noqa: F401

import torch
from checks import check_close, check_that_the_job_goes_on, raises, same_everywhere

import gtopk.torch as hvd

RANK, SIZE = hvd.rank(), hvd.size()
RANKS = range(SIZE)
ODD = SIZE - 1
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def total(value: Callable[[int], float]) -> float:
    return sum(value(rank) for rank in RANKS)


def disagree(calls: dict[str, Callable[[], Any]]) -> None:
    """Check that an operation with another signature on one rank is a harmless error on all."""
    if SIZE == 1:
        return
    for part, call in calls.items():
        text = raises(hvd.HorovodInternalError, call, f"rank {ODD}: ", *part.split("|"))
        check_that_the_job_goes_on()
        assert same_everywhere(text)


# ---- alltoall


def block(sender: int, receiver: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((rows, 3), 10 * sender + receiver).to(dtype)


def test_alltoall_without_splits_deals_rows_out_evenly() -> None:
    for dtype in (*INTEGERS, *FLOATS, torch.bool):
        tensor = torch.cat([block(RANK, receiver, 2, dtype) for receiver in RANKS])
        result = hvd.alltoall(tensor)
        assert isinstance(result, torch.Tensor)
        assert torch.equal(result, torch.cat([block(sender, RANK, 2, dtype) for sender in RANKS]))
    assert hvd.alltoall(torch.empty(0, 2)).shape == (0, 2)
    assert hvd.alltoall(torch.arange(SIZE) + 100 * RANK).tolist() == [
        100 * sender + RANK for sender in RANKS
    ]


def test_alltoall_with_splits_returns_the_received_row_counts() -> None:
    def rows(sender: int, receiver: int) -> int:
        return (sender + 2 * receiver) % 4  # some pairs exchange nothing

    for kept in (0, 2):  # the last rows go to nobody
        for as_list in (True, False):
            splits: Any = [rows(RANK, receiver) for receiver in RANKS]
            blocks = [block(RANK, r, rows(RANK, r), torch.float32) for r in RANKS]
            tensor = torch.cat([*blocks, torch.full((kept, 3), -1.0)])
            if not as_list:
                splits = torch.tensor(splits, dtype=torch.int32)
            output, received = hvd.alltoall(tensor, splits, name="rows")
            expected = [block(s, RANK, rows(s, RANK), torch.float32) for s in RANKS]
            assert torch.equal(output, torch.cat(expected))
            assert received.dtype == torch.int32
            assert received.tolist() == [rows(s, RANK) for s in RANKS]
            pair = hvd.synchronize(hvd.alltoall_async(tensor, splits=splits))
            assert torch.equal(pair[0], output)
            assert torch.equal(pair[1], received)
    output, received = hvd.synchronize(hvd.alltoall_async(torch.ones(SIZE)))
    assert (output.tolist(), received.tolist()) == ([1.0] * SIZE, [1] * SIZE)
    output, received = hvd.alltoall(torch.empty(SIZE, 0), [1] * SIZE)
    assert (output.shape, received.tolist()) == ((SIZE, 0), [1] * SIZE)


def test_alltoall_refuses_invalid_splits_at_once() -> None:
    rows = torch.ones(2 * SIZE)
    for splits, part in (
        ([1] * (SIZE + 1), f"one entry for each of the {SIZE} ranks"),
        ([3] * SIZE, f"no more than the {2 * SIZE} rows"),
        ([-1] + [1] * (SIZE - 1), "no less than 0"),
        (torch.ones(SIZE, dtype=torch.int64), "torch.int32"),
        (torch.ones(SIZE), "torch.int32"),
    ):
        raises(ValueError, lambda splits=splits: hvd.alltoall(rows, splits), part)
        raises(ValueError, lambda splits=splits: hvd.alltoall_async(rows, splits), part)
    if SIZE > 1:
        raises(ValueError, lambda: hvd.alltoall(torch.ones(SIZE + 1)), f"{SIZE + 1} rows", "splits")
    raises(ValueError, lambda: hvd.alltoall(rows.to_sparse()), "is not supported")


def test_alltoall_signatures_that_differ_are_an_error_on_all_ranks() -> None:
    raises(hvd.HorovodInternalError, lambda: hvd.alltoall(torch.tensor(1.0)), "scalar")
    check_that_the_job_goes_on()
    odd = RANK == ODD
    even = torch.ones(SIZE, 2)
    disagree(
        {
            "alltoall.x|float32 [*, 2]|float64 [*, 2]": lambda: hvd.alltoall(
                even.double() if odd else even, name="x"
            ),
            "alltoall.x|[*, 2]|[*, 3]": lambda: hvd.alltoall(
                torch.ones(SIZE, 3) if odd else even, name="x"
            ),
            "alltoall.x|[*, 2]|[*]": lambda: hvd.alltoall(
                torch.ones(SIZE) if odd else even, name="x"
            ),
        }
    )


def test_alltoall_gradient_returns_to_the_senders() -> None:
    splits = [receiver + 1 for receiver in RANKS]
    tensor = torch.ones(sum(splits) + 1, 2, requires_grad=True)
    output, received = hvd.alltoall(tensor, splits)
    assert received.requires_grad is False
    (output * (RANK + 1)).sum().backward()
    expected = [receiver + 1.0 for receiver in RANKS for _ in range(splits[receiver])] + [0.0]
    assert tensor.grad is not None
    assert tensor.grad.tolist() == [[value] * 2 for value in expected]
    tensor = torch.ones(SIZE, requires_grad=True)
    (hvd.alltoall(tensor) * (RANK + 1)).sum().backward()
    assert tensor.grad is not None
    assert tensor.grad.tolist() == [receiver + 1.0 for receiver in RANKS]


# ---- reducescatter


def own_rows(rows: int) -> slice:
    """Return this rank's rows: the first rows % SIZE ranks have one more."""
    each, more = divmod(rows, SIZE)
    counts = [each + (rank < more) for rank in RANKS]
    return slice(sum(counts[:RANK]), sum(counts[: RANK + 1]))


def matrix(rank: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(rows * 3).reshape(rows, 3) % 4 + rank).to(dtype)


def test_reducescatter_gives_each_rank_its_rows() -> None:
    for rows in (SIZE, 2 * SIZE + 1, SIZE - 1, 0):
        for dtype in (*INTEGERS, *FLOATS):
            every = sum(matrix(rank, rows, torch.int64) for rank in RANKS)[own_rows(rows)]
            tensor = matrix(RANK, rows, dtype)
            result = hvd.reducescatter(tensor, op=hvd.Sum)
            assert result.dtype == dtype
            assert torch.equal(result, every.to(dtype)), (rows, dtype)
            mean = every.double() / SIZE
            if not dtype.is_floating_point:
                mean = mean.trunc()
            check_close(hvd.reducescatter(tensor), mean.to(dtype))
            handle = hvd.reducescatter_async(tensor, None, hvd.Sum)  # op comes third here
            assert torch.equal(hvd.synchronize(handle), every.to(dtype))
            assert torch.equal(tensor, matrix(RANK, rows, dtype)), "the argument changed"
    flat = hvd.reducescatter(torch.arange(2.0 * SIZE), op=hvd.Sum)
    assert flat.tolist() == [SIZE * 2.0 * RANK, SIZE * (2.0 * RANK + 1)]


def test_reducescatter_applies_prescale_postscale_and_compression() -> None:
    tensor = torch.full((SIZE, 2), RANK + 1.0)
    sum_of_ranks = total(lambda rank: rank + 1)
    result = hvd.reducescatter(tensor, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    assert result.tolist() == [[2.0 * sum_of_ranks] * 2]
    whole = hvd.reducescatter(tensor.int(), op=hvd.Sum, prescale_factor=0.5, postscale_factor=1.5)
    assert whole.tolist() == [[int(1.5 * total(lambda rank: (rank + 1) // 2))] * 2]
    halves = hvd.reducescatter(tensor, "halves", hvd.Compression.fp16, hvd.Sum)
    assert (halves.dtype, halves.tolist()) == (torch.float32, [[sum_of_ranks] * 2])


def test_reducescatter_refuses_ops_other_than_sum_and_average() -> None:
    for op in (hvd.Adasum, hvd.Min, hvd.Max, hvd.Product, 17):
        for call in (
            lambda op=op: hvd.reducescatter(torch.ones(SIZE), op=op),
            lambda op=op: hvd.reducescatter_async(torch.ones(SIZE), op=op),
            lambda op=op: hvd.grouped_reducescatter([torch.ones(SIZE)], op=op),
        ):
            raises(ValueError, call, "op=Average or op=Sum")


def test_reducescatter_signatures_that_differ_are_an_error_on_all_ranks() -> None:
    raises(hvd.HorovodInternalError, lambda: hvd.reducescatter(torch.tensor(1.0)), "scalar")
    check_that_the_job_goes_on()
    odd = RANK == ODD
    ones = torch.ones(SIZE, 2)
    disagree(
        {
            "reducescatter.x|float32|int32": lambda: hvd.reducescatter(
                ones.int() if odd else ones, name="x"
            ),
            f"reducescatter.x|[{SIZE}, 2]|[{SIZE}, 3]": lambda: hvd.reducescatter(
                torch.ones(SIZE, 3) if odd else ones, name="x"
            ),
            "reducescatter.x|op=Average|op=Sum": lambda: hvd.reducescatter(
                ones, name="x", op=hvd.Sum if odd else hvd.Average
            ),
            "reducescatter.x|postscale_factor=1.0|postscale_factor=2.0": lambda: hvd.reducescatter(
                ones, name="x", postscale_factor=2.0 if odd else 1.0
            ),
        }
    )


def test_reducescatter_gradient_matches_horovods() -> None:
    for op, factor in ((hvd.Average, 1), (hvd.Sum, SIZE)):
        tensor = torch.ones(2 * SIZE, requires_grad=True)
        (hvd.reducescatter(tensor, op=op, postscale_factor=3.0) * (RANK + 1)).sum().backward()
        expected = [3.0 * factor * (rank + 1) for rank in RANKS for _ in range(2)]
        assert tensor.grad is not None
        assert tensor.grad.tolist() == expected


# ---- groups


def group(rank: int) -> list[torch.Tensor]:
    return [
        torch.full((2, 2), rank + 1.0),
        torch.full((3,), rank + 1, dtype=torch.int32),
        torch.full((SIZE,), 2.0 * rank),
        torch.tensor(rank + 0.5, dtype=torch.float16),
    ]


def summed() -> list[torch.Tensor]:
    return [
        torch.stack(parts).sum(0).to(parts[0].dtype)
        for parts in zip(*map(group, RANKS), strict=True)
    ]


def equal(results: Any, expected: list[torch.Tensor]) -> bool:
    return all(
        r.dtype == e.dtype and torch.equal(r, e) for r, e in zip(results, expected, strict=True)
    )


def test_grouped_allreduce_equals_single_allreduces() -> None:
    result = hvd.grouped_allreduce(group(RANK), op=hvd.Sum, name="group")
    assert isinstance(result, list)
    assert equal(result, summed())
    tensors = group(RANK)
    results = hvd.grouped_allreduce_(tensors, op=hvd.Sum)
    assert [*map(id, results)] == [*map(id, tensors)]
    assert equal(tensors, summed())
    handle = hvd.grouped_allreduce_async(group(RANK), op=hvd.Sum)
    assert isinstance(handle, int)
    result = hvd.synchronize(handle)
    assert isinstance(result, tuple)
    assert equal(result, summed())
    tensors = group(RANK)
    hvd.synchronize(hvd.grouped_allreduce_async_(tensors, op=hvd.Sum))
    assert equal(tensors, summed())
    singles = [hvd.allreduce(tensor) for tensor in group(RANK)]
    assert equal(hvd.grouped_allreduce(group(RANK)), singles)
    tensors = [torch.ones(2), torch.ones(3).double()]
    halves = hvd.grouped_allreduce(tensors, compression=hvd.Compression.fp16, op=hvd.Sum)
    assert equal(halves, [tensor * SIZE for tensor in tensors])
    doubled = hvd.grouped_allreduce(group(RANK), op=hvd.Sum, prescale_factor=2.0)
    assert doubled[0].tolist() == (summed()[0] * 2).tolist()
    assert hvd.grouped_allreduce([]) == []


def test_grouped_allreduce_signatures_that_differ_are_an_error_on_all_ranks() -> None:
    odd = RANK == ODD
    ones = torch.ones(3)
    disagree(
        {
            "grouped_allreduce.x|2 tensors|1 tensors": lambda: hvd.grouped_allreduce(
                [ones] if odd else [ones, ones], name="x"
            ),
            "grouped_allreduce.x|tensor 1: |[3]|[4]": lambda: hvd.grouped_allreduce(
                [ones, torch.ones(4) if odd else ones], name="x"
            ),
            "grouped_allreduce.x|op=Sum|op=Max": lambda: hvd.grouped_allreduce(
                [ones, ones], name="x", op=hvd.Max if odd else hvd.Sum
            ),
        }
    )
    sparse = torch.ones(2).to_sparse()
    raises(ValueError, lambda: hvd.grouped_allreduce([ones, sparse]), "is not supported")
    strided = torch.ones(2, 3).t()
    raises(ValueError, lambda: hvd.grouped_allreduce_([ones, strided]), "contiguous")
    raises(
        ValueError, lambda: hvd.grouped_allreduce([ones], True, op=hvd.Sum), "supersedes average"
    )


def test_grouped_allgather_and_reducescatter_equal_single_calls() -> None:
    tensors = [torch.full((RANK + 1, 2), float(RANK)), torch.full((2,), RANK)]
    expected = [
        torch.cat([torch.full((rank + 1, 2), float(rank)) for rank in RANKS]),
        torch.cat([torch.full((2,), rank) for rank in RANKS]),
    ]
    assert equal(hvd.grouped_allgather(tensors), expected)
    assert equal(hvd.synchronize(hvd.grouped_allgather_async(tensors, name="two")), expected)
    tensors = [
        matrix(RANK, 2 * SIZE + 1, torch.float32),
        matrix(RANK, SIZE, torch.int32),
        matrix(RANK, SIZE + 2, torch.float32),
    ]
    singles = [hvd.reducescatter(tensor, op=hvd.Sum) for tensor in tensors]
    assert equal(hvd.grouped_reducescatter(tensors, op=hvd.Sum), singles)
    handle = hvd.grouped_reducescatter_async(tensors, "three", hvd.Sum)
    assert equal(hvd.synchronize(handle), singles)
    odd, ones = RANK == ODD, torch.ones(3)
    disagree(
        {
            "grouped_allgather.x|[*]|[*, 1]": lambda: hvd.grouped_allgather(
                [ones, torch.ones(3, 1) if odd else ones], name="x"
            ),
            "grouped_reducescatter.x|[3]|[4]": lambda: hvd.grouped_reducescatter(
                [ones, torch.ones(4) if odd else ones], name="x"
            ),
        }
    )


def test_grouped_operations_have_the_gradients_of_single_ones() -> None:
    weight = total(lambda rank: rank + 1)
    first, second = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    one, two = hvd.grouped_allreduce([first, second], op=hvd.Sum)
    ((one.sum() + 2 * two.sum()) * (RANK + 1)).backward()
    assert first.grad is not None
    assert second.grad is not None
    assert first.grad.tolist() == [weight] * 2
    assert second.grad.tolist() == [2 * weight] * 3
    first, second = torch.ones(RANK + 1, requires_grad=True), torch.ones(1, requires_grad=True)
    one, two = hvd.grouped_allgather([first, second])
    ((one.sum() + 2 * two.sum()) * (RANK + 1)).backward()
    assert first.grad is not None
    assert second.grad is not None
    check_close(first.grad, torch.full((RANK + 1,), weight / SIZE))
    check_close(second.grad, torch.full((1,), 2 * weight / SIZE))
    first = torch.ones(SIZE, requires_grad=True)
    (one,) = hvd.grouped_reducescatter([first], op=hvd.Average)
    (one * (RANK + 1)).sum().backward()
    assert first.grad is not None
    assert first.grad.tolist() == [rank + 1.0 for rank in RANKS]


# ---- Adasum


def test_adasum_averages_equal_gradients_and_adds_orthogonal_ones() -> None:
    for dtype in FLOATS:
        alike = torch.tensor([3.0, -4.0], dtype=dtype)
        own = torch.eye(SIZE, dtype=dtype)[RANK] * (RANK + 1)
        apart = torch.arange(1, SIZE + 1).to(dtype)
        check_close(hvd.allreduce(alike, op=hvd.Adasum), alike)
        in_place = own.clone()
        assert hvd.allreduce_(in_place, op=hvd.Adasum) is in_place
        check_close(in_place, apart)
        # In a group, each tensor is combined by itself.
        tensors = [alike, own, alike.double()]
        one, two, three = hvd.grouped_allreduce(tensors, op=hvd.Adasum, postscale_factor=2.0)
        check_close(one, alike * 2)
        check_close(two, apart * 2)
        check_close(three, alike.double() * 2)
    raises(ValueError, lambda: hvd.allreduce(torch.ones(2).int(), op=hvd.Adasum), "floats are")
    tensor = torch.ones(2, requires_grad=True)
    hvd.allreduce(tensor, op=hvd.Adasum).sum().backward()
    check_close(tensor.grad, torch.ones(2))


# ---- sparse


def sparse(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a rank's rows of a matrix; all ranks have row 0, and the first rank has only that."""
    rows = torch.tensor([[0, *range(1, rank + 1)]])
    values = torch.full((rank + 1, 2), rank + 1.0, dtype=dtype)
    return torch.sparse_coo_tensor(rows, values, (SIZE + 1, 2), check_invariants=True)


def test_sparse_allreduce_adds_sparse_tensors() -> None:
    for dtype in (torch.float32, torch.float16, torch.float64):
        every = torch.stack([sparse(rank, dtype).to_dense().double() for rank in RANKS]).sum(0)
        for op, expected in ((hvd.Sum, every), (hvd.Average, every / SIZE)):
            handle = hvd.sparse_allreduce_async(sparse(RANK, dtype), "embedding", op)
            result = handle()
            assert result.is_sparse
            assert (result.dtype, result.shape) == (dtype, (SIZE + 1, 2))
            assert result._nnz() == sum(rank + 1 for rank in RANKS)  # not coalesced
            check_close(result.to_dense(), expected.to(dtype))
    nothing = torch.zeros(3).to_sparse()
    assert hvd.sparse_allreduce_async(nothing, "nothing", hvd.Sum)()._nnz() == 0


def test_sparse_allreduce_refuses_bad_ops_and_differing_shapes() -> None:
    for op in (hvd.Adasum, hvd.Min, hvd.Max, hvd.Product):
        raises(
            ValueError,
            lambda op=op: hvd.sparse_allreduce_async(sparse(RANK), "x", op),
            "op=Average or op=Sum",
        )
    dense = torch.ones(2)
    raises(ValueError, lambda: hvd.sparse_allreduce_async(dense, "x", hvd.Sum), "sparse COO")
    if SIZE == 1:
        return
    wide = torch.zeros(SIZE + 7, 2).to_sparse()
    finish = hvd.sparse_allreduce_async(wide if RANK == ODD else sparse(RANK), "x", hvd.Sum)
    raises(hvd.HorovodInternalError, finish, "x.values", f"[{SIZE + 1}, 2]", f"[{SIZE + 7}, 2]")
    check_that_the_job_goes_on()


# ---- dtypes that Horovod does not support


def test_bool_tensors_are_reduced_logically() -> None:
    for op, expected in (
        (hvd.Sum, [True, True, False]),
        (hvd.Max, [True, True, False]),
        (hvd.Average, [True, SIZE == 1, False]),
        (hvd.Min, [True, SIZE == 1, False]),
        (hvd.Product, [True, SIZE == 1, False]),
    ):
        tensor = torch.tensor([True, RANK == ODD, False])
        assert hvd.allreduce(tensor, op=op).tolist() == expected
    every = torch.ones(SIZE, dtype=torch.bool)
    assert hvd.reducescatter(every, op=hvd.Sum).tolist() == [True]


def test_average_of_small_integers_does_not_overflow() -> None:
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32):
        largest = torch.iinfo(dtype).max
        tensor = torch.full((SIZE,), largest, dtype=dtype)
        assert hvd.allreduce(tensor).tolist() == [largest] * SIZE
        assert hvd.reducescatter(tensor).tolist() == [largest]

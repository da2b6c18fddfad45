"""Integer reductions if an average or a factor gives no integer."""

from __future__ import annotations

import math

import pytest
import torch

import gtopk.torch as hvd


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("factor", [0.5, 1.0, 10.0])
def test_integer_average_is_scaled_before_it_is_truncated(ranks, size, factor):
    def program(rank):
        tensor = torch.tensor([rank, -rank, 1, 10 * (rank == 0), 7]).repeat(size)
        options = {"op": hvd.Average, "postscale_factor": factor}
        reduced = hvd.allreduce(tensor, **options)
        assert hvd.allreduce_(tensor.short(), **options).tolist() == reduced.tolist()
        assert hvd.reducescatter(tensor, **options).tolist() == reduced[:5].tolist()
        return reduced[:5].tolist()

    total = size * (size - 1) / 2
    sums = [total, -total, size, 10, 7 * size]
    expected = [int(factor * each / size) for each in sums]
    assert ranks(size, program) == [expected] * size


def test_integer_average_without_a_factor_is_exact(ranks):
    large = 2**60 + 1
    tensor = torch.tensor([large, -large])
    assert ranks(1, lambda rank: hvd.allreduce(tensor).tolist()) == [[large, -large]]


@pytest.mark.parametrize("factor", ["prescale_factor", "postscale_factor"])
def test_nan_factor_is_refused_and_leaves_nothing_in_flight(ranks, factor):
    def program(rank):
        for call in (hvd.allreduce, hvd.grouped_allreduce, hvd.reducescatter):
            tensor = torch.ones(2)
            with pytest.raises(hvd.HorovodInternalError, match="must be numbers, got nan"):
                call([tensor] if call is hvd.grouped_allreduce else tensor, **{factor: math.nan})
        return hvd.allreduce(torch.ones(2)).tolist()

    assert ranks(2, program) == [[1.0, 1.0]] * 2

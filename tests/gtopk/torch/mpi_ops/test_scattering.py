"""The rows and shapes that reducescatter gives to each rank."""

from __future__ import annotations

import pytest
import torch

import gtopk.torch as hvd


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("shape", [(5, 0), (0, 3), (0, 0), (4, 2, 0)])
def test_reducescatter_divides_rows_without_elements_like_others(ranks, size, shape):
    def program(rank):
        alone = hvd.reducescatter(torch.ones(shape), op=hvd.Sum)
        full, grouped = hvd.grouped_reducescatter([torch.ones(size), torch.ones(shape)], op=hvd.Sum)
        assert full.tolist() == [size]
        assert grouped.shape == alone.shape
        return tuple(alone.shape)

    rows = [len(part) for part in torch.arange(shape[0]).tensor_split(size)]
    assert ranks(size, program) == [(count, *shape[1:]) for count in rows]

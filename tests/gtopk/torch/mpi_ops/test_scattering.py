"""The rows and shapes that reducescatter gives to each rank."""

from __future__ import annotations

import pytest
import torch

import gtopk.torch as hvd


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("shape", [(5, 0), (0, 3), (0, 0), (4, 2, 0)])
def test_rows_without_elements_are_dealt_out_as_others_are(ranks, size, shape):
    def program(rank):
        alone = hvd.reducescatter(torch.ones(shape), op=hvd.Sum)
        full, grouped = hvd.grouped_reducescatter([torch.ones(size), torch.ones(shape)], op=hvd.Sum)
        assert full.tolist() == [size]
        assert grouped.shape == alone.shape
        return tuple(alone.shape)

    rows = [len(part) for part in torch.arange(shape[0]).tensor_split(size)]
    assert ranks(size, program) == [(mine, *shape[1:]) for mine in rows]

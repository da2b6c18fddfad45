"""Deltas come back as separate tensors with the same dtypes, shapes and order."""

from __future__ import annotations

import pytest
import torch

from collectives.transports import LocalTransport
from gtopk.compression import Compression
from gtopk.optim.adasum import Deltas


def tensors() -> list[torch.Tensor]:
    """Return tensors with alternating dtypes; one is empty, one has no dimension."""
    dtypes = [torch.float32, torch.bfloat16, torch.float64]
    shapes = [(2, 3), (), (0, 4), (5,), (1, 2), (2, 2)]
    return [
        torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtypes[place % 3]) + place
        for place, shape in enumerate(shapes)
    ]


@pytest.mark.parametrize("compressor", [Compression.none, Compression.fp16, Compression.bf16])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_equal_deltas_of_all_ranks_are_returned_unchanged(threads, size, compressor):
    def program(transport: LocalTransport) -> list[torch.Tensor]:
        deltas = Deltas(tensors(), compressor)
        deltas.allreduce(transport)
        return deltas.tensors()

    for combined in threads(size, program):
        for tensor, expected in zip(combined, tensors(), strict=True):
            torch.testing.assert_close(tensor, expected)


def test_noncontiguous_deltas_are_returned_in_order(threads):
    first = torch.arange(6.0).reshape(2, 3).T

    def program(transport: LocalTransport) -> torch.Tensor:
        deltas = Deltas([first], Compression.none)
        deltas.allreduce(transport)
        return deltas.tensors()[0]

    assert all(torch.equal(tensor, first) for tensor in threads(2, program))

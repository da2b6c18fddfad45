"""Collectives send only data that other ranks need."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import gtopk.torch as hvd
from collectives.transports import LocalTransport
from gtopk.runtime.world import world

ROWS = 1000  # for each rank


def sent_bytes(threads, ranks: int, operation: Callable[[torch.Tensor], object]) -> list[int]:
    """Return each rank's bytes for `operation` on ROWS float32 per rank, without the agreement."""

    def program(transport: LocalTransport) -> int:
        sent = 0
        send_on = transport.send_on

        def counting(stream, message, to):
            nonlocal sent
            # The agreement's messages have only a few hundred bytes.
            sent += message.size if message.size >= 4 * ROWS else 0
            return send_on(stream, message, to)

        transport.send_on = counting  # type: ignore[method-assign]
        with world.entered(transport):
            operation(torch.arange(ranks * ROWS, dtype=torch.float32))
        return sent

    return threads(ranks, program)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_alltoall_sends_each_rank_its_own_rows(threads, ranks: int) -> None:
    expected = [4 * ROWS * (ranks - 1)] * ranks
    assert sent_bytes(threads, ranks, hvd.alltoall) == expected


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_reducescatter_sends_each_row_once(threads, ranks: int) -> None:
    expected = [4 * ROWS * (ranks - 1)] * ranks
    assert sent_bytes(threads, ranks, lambda t: hvd.reducescatter(t, op=hvd.Sum)) == expected
    group = sent_bytes(
        threads, ranks, lambda t: hvd.grouped_reducescatter([t, t.clone()], op=hvd.Sum)
    )
    assert group == [2 * size for size in expected]


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_bfloat16_is_reduced_in_half_the_bytes_of_float32(threads, ranks: int) -> None:
    compression = hvd.Compression.bf16
    expected = [2 * 2 * 2 * ROWS * (ranks - 1)] * ranks
    for allreduce in (
        lambda t: hvd.allreduce(t.repeat(2), op=hvd.Sum, compression=compression),
        lambda t: hvd.allreduce(t.repeat(2).bfloat16(), op=hvd.Sum),
        lambda t: hvd.grouped_allreduce([t, t.clone()], op=hvd.Sum, compression=compression),
    ):
        assert sent_bytes(threads, ranks, allreduce) == expected

    for reducescatter in (
        lambda t: hvd.reducescatter(t.repeat(2), op=hvd.Sum, compression=compression),
        lambda t: hvd.grouped_reducescatter([t, t.clone()], op=hvd.Sum, compression=compression),
    ):
        assert sent_bytes(threads, ranks, reducescatter) == [2 * 2 * ROWS * (ranks - 1)] * ranks

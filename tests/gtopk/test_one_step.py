"""A step whose buckets come one by one, and what becomes of them in another thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from collectives.transports import local_world
from gtopk.compression import GTopK
from gtopk.exchange import Progress
from gtopk.lanes import open_lane
from gtopk.one_step import NOT_FINITE, OneStep


@pytest.mark.parametrize("vote", [0, NOT_FINITE])
def test_gradients_are_written_on_the_stream_of_their_bucket(vote: int) -> None:
    parameter = torch.nn.Parameter(torch.zeros(30))
    parameter.grad = torch.ones(30)
    lane = open_lane("lane", [parameter], ["parameter"], GTopK(0.1), Progress())
    lane.take(1.0, 1.0)
    on_it = 0  # how often the gradient was written there

    @contextmanager
    def on_stream() -> Iterator[None]:
        nonlocal on_it
        before = parameter.grad._version
        yield
        on_it += parameter.grad._version - before

    lane.bucket.on_stream = on_stream
    taken = parameter.grad._version
    OneStep().run(lane, local_world(1)[0], [vote])
    assert parameter.grad._version - taken == on_it > 0
    assert parameter.grad.isnan().all() == bool(vote)

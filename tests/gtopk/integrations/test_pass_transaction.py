"""A step whose buckets arrive one by one, and are exchanged in another thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from collectives.transports import local_world
from gtopk.compression import GTopK
from gtopk.exchange.bucket_exchange import open_bucket_exchange
from gtopk.exchange.exchange import Progress
from gtopk.integrations.passes import PassTransaction
from gtopk.optim.step_transaction import NOT_FINITE


@pytest.mark.parametrize("flags", [0, NOT_FINITE])
def test_gradients_are_written_on_the_stream_of_their_bucket(flags: int) -> None:
    parameter = torch.nn.Parameter(torch.zeros(30))
    parameter.grad = torch.ones(30)
    bucket_exchange = open_bucket_exchange(
        "lane", [parameter], ["parameter"], GTopK(0.1), Progress()
    )
    bucket_exchange.capture_gradients(1.0, 1.0)
    on_it = 0  # number of writes of the gradient there

    @contextmanager
    def on_stream() -> Iterator[None]:
        nonlocal on_it
        before = parameter.grad._version
        yield
        on_it += parameter.grad._version - before

    bucket_exchange.bucket.on_stream = on_stream
    taken = parameter.grad._version
    transaction = PassTransaction()
    transaction.run(transaction.add(bucket_exchange), local_world(1)[0], [flags])
    assert parameter.grad._version - taken == on_it > 0
    assert parameter.grad.isnan().all() == bool(flags)


def test_bucket_exchanged_twice_in_a_skipped_step_is_restored() -> None:
    """As for a module that is used twice in a pass."""
    parameter = torch.nn.Parameter(torch.zeros(30))
    bucket_exchange = open_bucket_exchange(
        "lane", [parameter], ["parameter"], GTopK(0.1), Progress()
    )
    step, residual = PassTransaction(), bucket_exchange.exchange.residual
    assert residual is not None
    seen = []
    # The step before, then one of three.
    for all_flags in ([0], [0], [0], [NOT_FINITE]):
        parameter.grad = torch.arange(30.0)
        bucket_exchange.capture_gradients(1.0, 1.0)
        step.run(step.add(bucket_exchange), local_world(1)[0], all_flags)
        if not seen:
            assert step.close()
            step = PassTransaction()
            seen.append(residual.after_last_step()["residual"].clone())
    assert not step.close()
    assert torch.equal(residual.after_last_step()["residual"], seen[0])

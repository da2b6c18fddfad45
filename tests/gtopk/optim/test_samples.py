"""Ranks are weighted with their numbers of samples, so that unequal batches train correctly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.transports import LocalTransport
from gtopk.compression import Compression
from gtopk.errors import HorovodInternalError
from gtopk.optim.samples import FLAG_BITS_BELOW_SAMPLES, MOST, Samples
from gtopk.runtime.world import world
from tests.gtopk.four_layers import distribute, flat, inputs, layers
from tests.gtopk.held import held


@settings(deadline=None)
@given(
    st.lists(st.integers(0, MOST), min_size=1, max_size=20),
    st.integers(0, 2**FLAG_BITS_BELOW_SAMPLES - 1),
)
def test_weights_are_shares_of_the_total(counts: list[int], rest_of_flags: int) -> None:
    ranks = [Samples(count) for count in counts]
    all_flags = [rank.flags | rest_of_flags for rank in ranks]
    assert max(all_flags) < 2**63
    weights = [rank.weight(all_flags) for rank in ranks]
    assert weights == [count / sum(counts) if count else 0.0 for count in counts]


@settings(deadline=None)
@given(st.lists(st.integers(0, 99), min_size=1, max_size=20), st.integers(1, 9))
def test_weights_do_not_depend_on_the_total_number_of_samples(
    counts: list[int], factor: int
) -> None:
    small, large = ([Samples(n * each) for each in counts] for n in (1, factor))
    for one, other in zip(small, large, strict=True):
        weight = other.weight([rank.flags for rank in large])
        assert weight == pytest.approx(one.weight([rank.flags for rank in small]))


@pytest.mark.parametrize("convert", [np.int64, np.int32, np.uint8, torch.tensor])
def test_numpy_or_torch_sample_count_becomes_a_python_int(convert: Any) -> None:
    samples = Samples(convert(7))
    assert samples.flags == Samples(7).flags
    assert type(samples.flags) is int


@pytest.mark.parametrize("number", [7.0, "7", torch.tensor([7, 8]), torch.tensor(0.5)])
def test_sample_count_that_is_no_integer_raises(number: Any) -> None:
    with pytest.raises(TypeError, match="number of samples must be a whole number, got"):
        Samples(number)


def test_gradient_of_a_summed_loss_has_weight_one_over_the_total() -> None:
    ranks = [Samples(count, summed=True) for count in (3, 0, 5)]
    all_flags = [rank.flags for rank in ranks]
    assert [rank.weight(all_flags) for rank in ranks] == [1 / 8, 0.0, 1 / 8]
    assert [rank.share(all_flags) for rank in ranks] == [3 / 8, 0.0, 5 / 8]


def test_signature_tells_whether_and_how_samples_are_weighted() -> None:
    assert (
        len({Samples(None).signature, Samples(3).signature, Samples(3, summed=True).signature}) == 3
    )
    assert Samples(3).signature == Samples(4).signature


@pytest.mark.parametrize("count", [-1, MOST + 1])
def test_sample_count_out_of_range_raises(count: int) -> None:
    with pytest.raises(ValueError, match="must lie in 0"):
        Samples(count)


def samples_of(rank: int, step: int) -> int:
    """Return a rank's number of samples: each rank has none in turn; it changes in each step."""
    return (2 * rank + step) % 5


def batch_of(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    count = samples_of(rank, step)
    return torch.randn(count, 3, generator=generator, dtype=torch.float64)


def mean_loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().sum(1).mean()


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("set_late", [False, True])
@pytest.mark.parametrize("compression", [Compression.none, Compression.gtopk(1.0)], ids=repr)
def test_unequal_batches_train_as_one_process_on_all_samples(
    threads, compression, set_late, summed
):
    """A rank without samples has NaN gradients, or none; if set late, nothing may overlap."""
    size, steps = 3, 8

    def program(transport: LocalTransport) -> Any:
        model, rank = layers(), transport.rank
        overlapping = 0
        with world.entered(transport):
            optimizer = distribute(model, compression)
            for step in range(steps):
                optimizer.zero_grad()
                x = batch_of(rank, step)
                count = len(x)
                if not set_late:
                    optimizer.set_num_samples(count, "sum" if summed else "mean")
                if count:
                    (mean_loss(model, x) * (count if summed else 1)).backward()
                elif step % 2:
                    mean_loss(model, torch.full((1, 3), torch.nan, dtype=torch.float64)).backward()
                overlapping += len(optimizer._handles) > 0
                optimizer.set_num_samples(count, "sum" if summed else "mean")
                optimizer.step()
                assert not optimizer.last_step.skipped
        with_samples = sum(samples_of(rank, step) > 0 for step in range(1, steps))
        return flat(model), overlapping, with_samples

    alone = layers()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        mean_loss(alone, torch.cat([batch_of(rank, step) for rank in range(size)])).backward()
        optimizer.step()
    for parameters, overlapping, with_samples in threads(size, program):
        torch.testing.assert_close(parameters, flat(alone), rtol=1e-12, atol=1e-14)
        assert overlapping <= 1 if set_late else overlapping == with_samples


def test_nothing_is_lost_while_unequal_batches_overlap(threads):
    """Sent so far + residuals = weighted gradients so far."""
    size = 3

    def program(transport: LocalTransport) -> Any:
        model, rank = layers(), transport.rank
        sent = torch.zeros_like(flat(model))
        weighted = sent.clone()
        with world.entered(transport):
            optimizer = distribute(model, Compression.gtopk(0.2))
            for step in range(8):
                optimizer.zero_grad()
                x = batch_of(rank, step)
                optimizer.set_num_samples(len(x))
                if len(x):
                    mean_loss(model, x).backward()
                    share = len(x) / sum(samples_of(other, step) for other in range(size))
                    weighted += share * torch.cat([p.grad.reshape(-1) for p in model.parameters()])
                optimizer.synchronize()
                sent += torch.cat([p.grad.reshape(-1) for p in model.parameters()])
                with optimizer.skip_synchronize():
                    optimizer.step()
            return sent, weighted, torch.from_numpy(held(optimizer).copy())

    ranks = threads(size, program)
    together = ranks[0][0] + sum(residual for *_, residual in ranks)
    expected = sum(weighted for _, weighted, _ in ranks)
    torch.testing.assert_close(together, expected, rtol=1e-12, atol=1e-12)


def test_ranks_that_disagree_about_samples_raise_and_can_continue(threads):
    def program(transport: LocalTransport) -> Any:
        model = layers()
        with world.entered(transport):
            optimizer = distribute(model)
            for step in range(5):
                optimizer.zero_grad()
                optimizer.set_num_samples(5 if step == 2 and transport.rank == 1 else None)
                model(inputs(transport.rank, step)).square().sum().backward()
                if step != 2:
                    optimizer.step()
                    continue
                before = held(optimizer).tobytes()
                with pytest.raises(HorovodInternalError, match="gradients weighted alike"):
                    optimizer.step()
                assert held(optimizer).tobytes() == before
        return flat(model)

    ranks = threads(3, program)
    assert all(torch.equal(parameters, ranks[0]) for parameters in ranks)


def test_sparse_gradients_are_weighted_by_samples(threads):
    def program(transport: LocalTransport) -> torch.Tensor:
        rows = torch.nn.Embedding(4, 2, sparse=True, dtype=torch.float64)
        with world.entered(transport):
            optimizer = distribute(rows)
            optimizer.set_num_samples(transport.rank)
            factor = transport.rank or float("nan")
            (rows(torch.tensor([transport.rank, 3])) * factor).sum().backward()
            optimizer.synchronize()
        return rows.weight.grad.to_dense()[:, 0]

    for gradient in threads(3, program):
        torch.testing.assert_close(gradient, torch.tensor([0, 1, 4, 5]).double() / 3)

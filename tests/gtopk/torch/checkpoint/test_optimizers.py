"""Optimizers resume from a checkpoint, each with its own residual and full state."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch

import gtopk
import gtopk.torch as hvd
from gtopk import load_latest, save_checkpoint
from gtopk.errors import DamagedError


def distributed(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compression = hvd.Compression.gtopk(density=0.2)
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression)


def local_sgd(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return gtopk.LocalSGD(optimizer, inner_steps=1, compression=hvd.Compression.gtopk(density=0.2))


def held_by_name(optimizer):
    (own_tensors,) = optimizer.state_dict()["gtopk"]["held"].values()
    return {name: tensors["residual"].clone() for name, tensors in own_tensors.items()}


@pytest.mark.parametrize("wrapped", [distributed, local_sgd])
@pytest.mark.parametrize("after", [1, 2, 3])
def test_residuals_of_a_second_optimizer_are_conserved(ranks, tmp_path, after, wrapped):
    def open_run():
        model = torch.nn.Linear(4, 3)
        torch.nn.init.constant_(model.weight, 0.5)
        torch.nn.init.zeros_(model.bias)
        return model, wrapped(model), torch.optim.Adam(model.parameters())

    def first(rank):
        model, optimizer, plain = open_run()
        generator = torch.Generator().manual_seed(rank)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(8, 4, generator=generator)).square().mean().backward()
            optimizer.step()
        save_checkpoint(tmp_path, model, None, second=optimizer, plain=plain)
        return held_by_name(optimizer)

    def then(rank):
        model, given, plain = open_run()
        _, asked, _ = open_run()
        options = {"generators": False, "plain": plain}
        assert load_latest(tmp_path, model, **options, second=given).values == {}
        asked.load_state_dict(load_latest(tmp_path, model, **options).values["second"])
        return held_by_name(given), held_by_name(asked)

    saved, found = ranks(2, first), ranks(after, then)
    for name in saved[0]:
        total = sum(part[name] for part in saved)
        assert total.any()
        for loaded in zip(*found, strict=True):
            now = sum(part[name] for part in loaded if name in part)
            torch.testing.assert_close(now, total, rtol=1e-6, atol=1e-8)


def test_older_format_of_a_second_optimizer_loads_on_as_many_ranks(ranks, tmp_path):
    """It stores a rank's residual in that optimizer's state."""

    class Older:
        def __init__(self, optimizer):
            self.state_dict = optimizer.state_dict

    def first(rank):
        model = torch.nn.Linear(4, 3)
        torch.nn.init.ones_(model.weight)
        optimizer = distributed(model)
        model(torch.full((2, 4), 1.0 + rank)).square().mean().backward()
        optimizer.step()
        save_checkpoint(tmp_path, model, None, second=Older(optimizer))
        return held_by_name(optimizer)

    def then(rank):
        model = torch.nn.Linear(4, 3)
        optimizer = distributed(model)
        load_latest(tmp_path, model, generators=False, second=optimizer)
        return held_by_name(optimizer)

    saved = ranks(2, first)
    assert str(saved[0]) != str(saved[1])
    assert str(ranks(2, then)) == str(saved)


def test_moments_of_a_process_set_are_restored_bit_for_bit(ranks, tmp_path, monkeypatch):
    """The set has fewer ranks than the job; a second moment includes a rank's weight in it."""
    monkeypatch.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", "1")

    def begin():
        model = torch.nn.Linear(6, 4)
        torch.nn.init.ones_(model.weight)
        torch.nn.init.zeros_(model.bias)
        return model, hvd.DistributedOptimizer(
            torch.optim.AdamW(model.parameters(), lr=0.1),
            model.named_parameters(),
            hvd.Compression.gtopk(0.3),
            process_set=hvd.add_process_set([1, 2]),
        )

    def own(optimizer):
        parts = optimizer.state_dict().get("gtopk", {"held": {}})["held"]
        return repr(next(iter(parts.values()), None))

    def first(rank):
        model, optimizer = begin()
        generator = torch.Generator().manual_seed(rank)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(5, 6, generator=generator)).square().sum().backward()
            optimizer.step()
        save_checkpoint(tmp_path, model, optimizer)
        return own(optimizer)

    def then(rank):
        model, optimizer = begin()
        load_latest(tmp_path, model, optimizer, generators=False)
        return own(optimizer)

    saved = ranks(3, first)
    assert "second_moment" in saved[1]
    assert ranks(3, then) == saved


def test_optimizers_parameter_names_may_differ_from_the_models(ranks, tmp_path):
    """For example those of a submodule, if only that is trained."""

    def program(rank):
        head = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), head)
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, 0.5)

        def begin():
            return hvd.DistributedOptimizer(
                torch.optim.SGD(head.parameters(), lr=0.1),
                head.named_parameters(),
                hvd.Compression.gtopk(density=0.2),
            )

        optimizer, again = begin(), begin()
        model(torch.full((2, 4), 1.0 + rank)).sum().backward()
        optimizer.step()
        save_checkpoint(tmp_path, model, optimizer)
        load_latest(tmp_path, model, again, generators=False)
        return str(held_by_name(optimizer)), str(held_by_name(again))

    for saved, found in ranks(2, program):
        assert saved == found


class Counting(torch.optim.SGD):
    """An optimizer with a counter next to the parameters' states, as torch allows."""

    def step(self, closure=None):
        super().step(closure)
        self.state["count"] = self.state.get("count", 0) + 1


@pytest.mark.parametrize(
    "wrapped", [hvd.DistributedOptimizer, partial(gtopk.LocalSGD, inner_steps=2)]
)
def test_optimizer_state_of_no_parameter_is_restored(ranks, tmp_path, wrapped):
    def program(rank):
        model = torch.nn.Linear(2, 1)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = wrapped(Counting(model.parameters(), lr=0.1, momentum=0.9))
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 2)).sum().backward()
            optimizer.step()
        save_checkpoint(tmp_path, model, optimizer)
        again = wrapped(Counting(model.parameters(), lr=0.1, momentum=0.9))
        load_latest(tmp_path, model, again, generators=False)
        return again.state["count"]

    assert ranks(2, program) == [3, 3]


def test_float_learning_rate_loads_into_an_optimizer_with_a_tensor(ranks, tmp_path):
    def program(rank):
        model = torch.nn.Linear(2, 1)
        save_checkpoint(tmp_path, model, torch.optim.Adam(model.parameters(), lr=0.5))
        # As for a compiled step, which would otherwise be recompiled for each rate.
        optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1))
        load_latest(tmp_path, model, optimizer, generators=False)
        return optimizer.param_groups[0]["lr"]

    assert ranks(2, program) == [0.5, 0.5]


@pytest.mark.parametrize("compression", [hvd.Compression.gtopk(density=0.2), hvd.Compression.none])
@pytest.mark.parametrize(
    "wrapped", [hvd.DistributedOptimizer, partial(gtopk.LocalSGD, inner_steps=1)]
)
def test_residual_of_another_shape_is_refused_on_load(ranks, wrapped, compression):
    """Not only in the next step, when the previous checkpoint is already removed."""

    def program(rank):
        states = []
        for width in (4, 5):
            model = torch.nn.Linear(width, 3)
            torch.nn.init.ones_(model.weight)
            torch.nn.init.zeros_(model.bias)
            own_compression = hvd.Compression.gtopk(density=0.2) if width == 4 else compression
            plain = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer = wrapped(
                plain, named_parameters=model.named_parameters(), compression=own_compression
            )
            if width == 4:
                model(torch.full((2, 4), 1.0 + rank)).square().sum().backward()
                optimizer.step()
            states.append(optimizer.state_dict())
        with pytest.raises(DamagedError, match=r"'weight' has the shape \[3, 4\], .*\[3, 5\]"):
            optimizer.load_state_dict(states[0])

    ranks(2, program)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("wrapped", [distributed, local_sgd])
def test_residual_that_is_not_finite_is_refused_on_load(ranks, wrapped, value):
    """Each later step would be skipped, as its gradients would not be finite."""

    def program(rank):
        model = torch.nn.Linear(4, 3, bias=False)
        torch.nn.init.ones_(model.weight)
        optimizer = wrapped(model)
        model(torch.full((2, 4), 1.0 + rank)).square().sum().backward()
        optimizer.step()
        state = copy.deepcopy(optimizer.state_dict())
        damaged = copy.deepcopy(state)
        (held,) = damaged["gtopk"]["held"].values()
        (parts,) = held.values()
        parts["residual"][1, 2] = value
        with pytest.raises(DamagedError, match=r"residual of '.*' holds NaN or infinity"):
            optimizer.load_state_dict(damaged)
        optimizer.load_state_dict(state)

    ranks(2, program)

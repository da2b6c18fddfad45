"""Horovod's arguments and the attributes that scripts read have the same meaning here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from collectives.transports import LocalTransport, local_world
from gtopk.compression import Compression
from gtopk.optim.distributed import DistributedOptimizer
from gtopk.reduce_ops import Average
from gtopk.runtime.world import process_sets, world
from tests.gtopk.four_layers import distribute, flat, inputs, layers, train
from tests.gtopk.held import held


def test_attributes_that_horovod_scripts_read_exist(threads):
    def program(transport: LocalTransport) -> None:
        model = layers()
        with world.entered(transport):
            optimizer = distribute(model, backward_passes_per_step=2)
            first = model[0].weight
            assert optimizer._parameter_names[first] == "0.weight"
            assert optimizer.op == Average
            assert optimizer.gradient_predivide_factor == 1.0
            assert optimizer._compression == Compression.gtopk(0.3)
            assert optimizer._requires_update == set(model.parameters())
            assert optimizer._allreduce_delay[first] == 2
            model(inputs(transport.rank, 0)).sum().backward()
            assert optimizer._allreduce_delay[first] == 1
            optimizer.set_backward_passes_per_step(1)
            assert optimizer.backward_passes_per_step == 1
            optimizer.step()

    threads(2, program)


def test_num_groups_is_deprecated_as_in_horovod():
    with world.entered(local_world(1)[0]), pytest.warns(DeprecationWarning, match="groups"):
        DistributedOptimizer(torch.optim.SGD(layers().parameters(), lr=0.1), num_groups=2)


@pytest.mark.parametrize("factor", [0.25, 4.0])
@pytest.mark.parametrize("compression", [Compression.none, Compression.gtopk(0.3)], ids=repr)
def test_predivide_factor_changes_no_result(threads, compression, factor):
    """Powers of two are exact."""
    plain = threads(2, lambda t: train(t, compression))
    divided = threads(2, lambda t: train(t, compression, gradient_predivide_factor=factor))
    for one, other in zip(plain, divided, strict=True):
        assert torch.equal(one[0], other[0])
        np.testing.assert_array_equal(one[1], other[1])


@pytest.mark.parametrize("then", ["gtopk", "none", "fp16", "sparse"])
@pytest.mark.parametrize("factors", [(4.0, 1.0), (1.0, 4.0), (3.0, 7.0)])
def test_residual_is_rescaled_under_another_predivide_factor(threads, factors, then):
    """With dense and sparse gradients: the first step sends part of it, or all."""
    compression = {"none": Compression.none, "fp16": Compression.fp16}.get(then)

    def program(transport: LocalTransport) -> tuple[torch.Tensor, torch.Tensor, float]:
        random = torch.Generator().manual_seed(transport.rank)
        parameter = torch.nn.Parameter(torch.zeros(40, 2))
        given, applied = torch.zeros_like(parameter), torch.zeros_like(parameter)

        def optimizer(compression: Any, factor: float) -> Any:
            return DistributedOptimizer(
                torch.optim.SGD([parameter], lr=0.0),
                compression=compression,
                gradient_predivide_factor=factor,
            )

        with world.entered(transport):
            first = optimizer(Compression.gtopk(0.1), factors[0])
            for _ in range(3):
                parameter.grad = torch.randn(parameter.shape, generator=random)
                given += parameter.grad / transport.size
                first.step()
                applied += parameter.grad
            second = optimizer(compression or Compression.gtopk(1.0), factors[1])
            second.load_state_dict(first.state_dict())
            nothing = torch.zeros_like(parameter)
            parameter.grad = nothing.to_sparse(1) if then == "sparse" else nothing
            second.step()
            left = torch.from_numpy(held(second)).reshape(parameter.shape)
            return given - left, applied + parameter.grad.to_dense(), float(held(first).sum())

    ranks = threads(2, program)
    torch.testing.assert_close(ranks[0][1], sum(sent for sent, _, _ in ranks))
    assert all(left for _, _, left in ranks)


def test_predivide_factor_keeps_a_sum_from_overflowing(threads):
    def program(transport: LocalTransport, factor: float) -> bool:
        parameter = torch.nn.Parameter(torch.zeros(3))
        with world.entered(transport):
            optimizer = DistributedOptimizer(
                torch.optim.SGD([parameter], lr=1e-38),
                compression=Compression.fp16,
                gradient_predivide_factor=factor,
            )
            parameter.grad = torch.full_like(parameter, 6e4 * 4)
            optimizer.step()
        return optimizer.last_step.skipped

    assert threads(2, lambda t: program(t, 1.0)) == [True, True]
    assert threads(2, lambda t: program(t, 16.0)) == [False, False]


def test_ranks_of_a_process_set_reduce_together_and_others_step_alone(threads):
    def program(transport: LocalTransport) -> Any:
        model, alone = layers(), layers()
        plain = torch.optim.SGD(alone.parameters(), lr=0.1)
        with world.entered(transport):
            pair = process_sets.ProcessSet([0, 2])
            process_sets.register(pair)
            optimizer = distribute(model, Compression.gtopk(1.0), process_set=pair)
            assert optimizer.process_set is pair
            for step in range(3):
                for each, of in ((optimizer, model), (plain, alone)):
                    each.zero_grad()
                    of(inputs(transport.rank, step)).square().sum().backward()
                    each.step()
            state = optimizer.gather_state(2) if pair.included() else None
            assert (state is None) == (transport.rank != 2)
            if pair.included():
                assert optimizer.last_step.ranks == 2
        return flat(model), flat(alone)

    first, other, last = threads(3, program)
    assert torch.equal(*other)
    assert torch.equal(first[0], last[0])
    assert not torch.equal(*first)

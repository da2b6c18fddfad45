"""The options of a distributed optimizer that are accepted or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from collectives.transports import LocalTransport, local_world
from gtopk.compression import Compression
from gtopk.optim.distributed import DistributedOptimizer
from gtopk.runtime.world import world
from tests.gtopk.four_layers import distribute, inputs, layers

HIDDEN = Compression.auto(hide_behind_backward=True)


@pytest.mark.parametrize("groups", [1, 2, 3, "lists"])
def test_groups_option_sets_the_buckets(threads, groups):
    def program(transport: LocalTransport) -> Any:
        model = layers()
        given = groups
        if groups == "lists":
            given = [[model[0].weight, model[3].weight]]
        with world.entered(transport):
            optimizer = distribute(model, bucket_bytes=None, groups=given)
            model(inputs(transport.rank, 0)).square().sum().backward()
            optimizer.step()
            return [
                bucket_exchange.names
                for bucket_exchange in optimizer._reducer.planned.bucket_exchanges
            ]

    for buckets in threads(2, program):
        if groups == "lists":
            assert sorted(map(sorted, buckets)) == [
                ["0.weight", "3.weight"],
                ["1.weight", "2.weight"],
            ]
        else:
            assert len(buckets) == groups


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"groups": 0}, "at least 1"),
        ({"groups": "two"}, "integer or a list of lists"),
        ({"groups": [1, 2]}, "integer or a list of lists"),
        ({"groups": 2, "bucket_bytes": 5}, "not both"),
        ({"bucket_bytes": -1}, "0 or more"),
        ({"local_clip_norm": 0.0}, "above 0"),
        ({"gradient_predivide_factor": float("nan")}, "above 0 and finite, got nan"),
        ({"gradient_predivide_factor": float("inf")}, "above 0 and finite, got inf"),
        ({"check_every": -1}, "0 or more"),
        ({"scaler": True}, "must be the GradScaler that scales the loss, got True"),
        ({"compression": HIDDEN, "overlap": False}, "not for overlap=False, .* give density="),
        ({"compression": HIDDEN, "local_clip_norm": 1.0}, "not for local_clip_norm=1.0"),
    ],
)
def test_invalid_option_raises(arguments, message):
    with (
        world.entered(local_world(1)[0]),
        pytest.raises((ValueError, TypeError), match=message),
    ):
        DistributedOptimizer(torch.optim.SGD(layers().parameters(), lr=0.1), **arguments)


def test_parameter_in_two_groups_raises():
    model = layers()
    with world.entered(local_world(1)[0]), pytest.raises(ValueError, match="twice"):
        DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            groups=[[model[0].weight], [model[0].weight]],
        )


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ([torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))], "complex"),
        ([torch.nn.Parameter(torch.zeros(0))], "nothing to train"),
    ],
)
def test_complex_or_empty_parameters_raise(parameters, message):
    with (
        world.entered(local_world(1)[0]),
        pytest.raises(ValueError, match=message),
    ):
        DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: torch.optim.Adam(p), "momentum of its own"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5), "momentum=0, not 0.5"),
        (
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5, weight_decay=1e-4),
            "momentum=0, not 0.5, and 2 times the weight_decay",
        ),
        (lambda p: torch.optim.LBFGS(p), "LBFGS"),
        (lambda p: DistributedOptimizer(torch.optim.SGD(p, lr=0.1)), "distributed already"),
    ],
)
def test_unsupported_optimizer_raises(make, message):
    with world.entered(local_world(1)[0]):
        optimizer = make(layers().parameters())
        with pytest.raises(ValueError, match=message):
            DistributedOptimizer(
                optimizer, compression=Compression.gtopk(0.1, momentum_correction=0.9)
            )


@pytest.mark.parametrize("make", [lambda p: [torch.optim.SGD(p, lr=0.1)], list, lambda p: p])
def test_argument_that_is_no_optimizer_raises(make):
    with (
        world.entered(local_world(1)[0]),
        pytest.raises(TypeError, match=r"must be a torch\.optim\.Optimizer, .* got"),
    ):
        DistributedOptimizer(make(layers().parameters()), compression=Compression.gtopk(0.1))

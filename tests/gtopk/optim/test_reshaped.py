"""Layers that change their shape under a distributed optimizer raise a clear error."""

from __future__ import annotations

import pytest
import torch

from collectives.transports import LocalTransport
from gtopk.compression import Compression
from gtopk.optim.distributed import DistributedOptimizer
from gtopk.runtime.world import world


@pytest.mark.parametrize("rows", [50, 200])
@pytest.mark.parametrize(
    ("kind", "compression"),
    [
        (torch.optim.SGD, Compression.none),
        (torch.optim.SGD, Compression.gtopk(0.01)),
        (torch.optim.SGD, Compression.shards()),
        (torch.optim.AdamW, Compression.none),
        (torch.optim.AdamW, Compression.gtopk(0.01)),
    ],
)
def test_changed_parameter_shape_raises_with_its_name(
    threads, kind, compression, rows: int
) -> None:
    says = rf"parameter 'weight' has the shape \[{rows}, 400\], but had \[100, 400\] .* wrap that"

    def program(transport: LocalTransport) -> None:
        # Large enough to be exchanged in place: torch would resize that memory.
        layer = torch.nn.Linear(400, 100, bias=False)
        torch.nn.init.ones_(layer.weight)
        with world.entered(transport):
            optimizer = DistributedOptimizer(
                kind(layer.parameters(), lr=0.01), layer.named_parameters(), compression
            )

            def take_step() -> None:
                optimizer.zero_grad()
                layer(torch.full((3, 400), 1.0 + transport.rank)).square().sum().backward()
                optimizer.step()

            take_step()
            take_step()
            layer.weight.data = torch.ones(rows, 400)
            optimizer.state.clear()
            with pytest.raises(ValueError, match=says):
                take_step()

    threads(2, program)

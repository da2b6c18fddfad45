"""A round's exchange continues with other exchanges' residuals, and finally sends all of them."""

from __future__ import annotations

from typing import Any

import torch

from collectives.transports import LocalTransport
from gtopk.adaptive.replica import RoundExchange
from gtopk.compression import Compression

ELEMENTS = 40
NODE = Compression.hierarchical(0.1, inside="dense")


def reduced(exchange: RoundExchange, transport: LocalTransport, sums: torch.Tensor) -> torch.Tensor:
    assert exchange.capture_sums([sums])
    update = exchange.reduce(transport, 1.0)
    assert update is not None
    return update[0].clone()


def test_smaller_node_sends_residuals_of_other_shards(threads) -> None:
    def saving(transport: LocalTransport) -> dict[str, Any]:
        exchange = RoundExchange([torch.nn.Parameter(torch.zeros(ELEMENTS).double())], NODE)
        random = torch.Generator().manual_seed(transport.rank)
        for _ in range(3):
            sums = torch.randn(ELEMENTS, generator=random, dtype=torch.float64)
            reduced(exchange, transport, sums)
        return exchange.state_dict()

    states = threads(4, saving)
    total = sum(state["residual"] for state in states)

    def loading(transport: LocalTransport) -> tuple[torch.Tensor, torch.Tensor]:
        exchange = RoundExchange([torch.nn.Parameter(torch.zeros(ELEMENTS).double())], NODE)
        nothing = torch.zeros(ELEMENTS, dtype=torch.float64)
        reduced(exchange, transport, nothing.clone())
        signature = exchange.signature
        two_residuals = states[transport.rank]["residual"] + states[transport.rank + 2]["residual"]
        exchange.load_state_dict({**states[transport.rank], "residual": two_residuals})
        assert exchange.signature != signature  # a rank that loads alone gets an error
        sent = sum(reduced(exchange, transport, nothing.clone()) for _ in range(12))
        assert exchange.signature == signature
        return sent, exchange.state_dict()["residual"]

    for sent, left in threads(2, loading):
        torch.testing.assert_close(sent, total)
        assert not left.any()

"""PowerSGD, to compare with: gradients as matrices, averaged as two thin factors.

Vogels et al. 2019, algorithms 1 and 2. Its baselines elsewhere are hooks of PyTorch's DDP; this one
runs on ranks that are threads.

    M + error  [n x m]        P = M Q       averaged over the ranks, made orthonormal   [n x r]
                              Q = M' P      averaged over the ranks                     [m x r]
    update = P Q'             error = M - update, stays on the rank
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from collectives.transports import Transport


class Cost(NamedTuple):
    """What a step cost: as telemetry's StepReport tells of other methods."""

    selected: int
    updated: int
    sent_bytes: int


class Matrix(NamedTuple):
    """What a rank keeps of a parameter from step to step; the next one starts from this Q."""

    error: torch.Tensor
    q: torch.Tensor


class LowRank:
    """An optimizer whose gradients are averaged by PowerSGD before each step."""

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        rank: int,
        transport: Transport,
    ) -> None:
        self._inner = inner
        self._transport = transport
        self._parameters = [parameter for _, parameter in named_parameters]
        self._matrices: dict[torch.nn.Parameter, Matrix] = {}
        generator = torch.Generator().manual_seed(0)  # the same Q everywhere
        for parameter in self._parameters:
            rows = parameter.shape[0]
            columns = parameter.numel() // rows
            if rank * (rows + columns) < parameter.numel():  # vectors travel whole
                error, q = (
                    torch.zeros(rows, columns),
                    torch.randn(columns, rank, generator=generator),
                )
                self._matrices[parameter] = Matrix(error, q)
        self.last_step: Any = None

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self._inner.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        """Average the gradients, and apply them."""
        before = self._transport.traffic.sent_bytes
        elements = 0
        for parameter in self._parameters:
            gradient = parameter.grad
            assert gradient is not None
            if parameter not in self._matrices:
                self._average(gradient)
                elements += gradient.numel()
                continue
            error, q = self._matrices[parameter]
            wanted = gradient.reshape(error.shape) + error
            p = self._average(wanted @ q)
            p = torch.linalg.qr(p).Q
            q = self._average(wanted.T @ p)
            update = p @ q.T
            self._matrices[parameter] = Matrix(wanted - update, q)
            gradient.copy_(update.view_as(gradient))
            elements += p.numel() + q.numel()
        self._inner.step()
        everything = sum(parameter.numel() for parameter in self._parameters)
        sent = self._transport.traffic.sent_bytes - before
        self.last_step = Cost(elements, everything, sent)

    def _average(self, tensor: torch.Tensor) -> torch.Tensor:
        """Average over the ranks, in place."""
        flat = tensor.contiguous().view(-1)
        self._transport.allreduce(flat.numpy())
        flat /= self._transport.size
        return tensor.copy_(flat.view_as(tensor))

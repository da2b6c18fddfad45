"""PowerSGD, for comparisons: gradients as matrices, averaged as two thin factors.

Vogels et al. 2019, algorithms 1 and 2. Unlike PyTorch's DDP hook, it runs on ranks that are
threads.

    M + error  [n x m]        P = M Q       averaged over the ranks, made orthonormal   [n x r]
                              Q = M' P      averaged over the ranks                     [m x r]
    update = P Q'             error = M - update, stays on the rank

M is a gradient, or with `betas` the rank's own step of Adam (the gradient preconditioned).
A step has three messages, as with the hook: all vectors, all P, all Q.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from collectives.transports import Transport


class Cost(NamedTuple):
    """A step's cost, with fields as in telemetry's StepReport."""

    selected: int
    updated: int
    sent_bytes: int


class Matrix(NamedTuple):
    """A rank's state of a parameter between steps; the next step starts from this Q."""

    error: torch.Tensor
    q: torch.Tensor


class ExchangingOptimizer:
    """An optimizer that exchanges gradients its own way before the inner one steps."""

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        transport: Transport,
    ) -> None:
        self._inner = inner
        self._transport = transport
        self._parameters = [parameter for _, parameter in named_parameters]
        self.last_step: Any = None

    def zero_grad(self) -> None:
        """Clear the gradients."""
        self._inner.zero_grad()


class LowRank(ExchangingOptimizer):
    """An optimizer whose gradients are averaged by PowerSGD before each step.

    betas: Adam's decays; the ranks then average their steps of Adam in place of gradients.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        rank: int,
        transport: Transport,
        betas: tuple[float, float] | None = None,
    ) -> None:
        super().__init__(inner, named_parameters, transport)
        self._betas = betas
        # Adam's, by parameter: the mean and the mean square of this rank's gradients; the steps.
        self._moments: dict[torch.nn.Parameter, tuple[torch.Tensor, torch.Tensor, int]] = {}
        self._matrices: dict[torch.nn.Parameter, Matrix] = {}
        generator = torch.Generator().manual_seed(0)  # the same Q on all ranks
        for parameter in self._parameters:
            rows = parameter.shape[0]
            columns = parameter.numel() // rows
            if rank * (rows + columns) < parameter.numel():  # vectors are sent whole
                error, q = (
                    torch.zeros(rows, columns),
                    torch.randn(columns, rank, generator=generator),
                )
                self._matrices[parameter] = Matrix(error, q)

    @torch.no_grad()
    def step(self) -> None:
        """Average the gradients, and apply them."""
        before = self._transport.traffic.sent_bytes
        if self._betas is not None:
            self._precondition(*self._betas)
        gradients = {each: each.grad for each in self._parameters if each.grad is not None}
        vectors = [gradient for each, gradient in gradients.items() if each not in self._matrices]
        for vector, mean in zip(vectors, self._averages(vectors), strict=True):
            vector.copy_(mean)

        kept = self._matrices.values()
        corrected = [
            gradients[each].reshape(matrix.error.shape) + matrix.error
            for each, matrix in self._matrices.items()
        ]
        ps = self._averages([m @ matrix.q for m, matrix in zip(corrected, kept, strict=True)])
        ps = [torch.linalg.qr(p).Q for p in ps]
        qs = self._averages([m.T @ p for m, p in zip(corrected, ps, strict=True)])
        for each, m, p, q in zip(list(self._matrices), corrected, ps, qs, strict=True):
            update = p @ q.T
            self._matrices[each] = Matrix(m - update, q)
            gradients[each].copy_(update.view_as(each))

        self._inner.step()
        everything = sum(parameter.numel() for parameter in self._parameters)
        sent = self._transport.traffic.sent_bytes - before
        elements = sum(each.numel() for each in (*vectors, *ps, *qs))
        self.last_step = Cost(elements, everything, sent)

    def _precondition(self, beta: float, beta2: float) -> None:
        """Replace this rank's gradients by its steps of Adam, at a rate of 1."""
        for parameter in self._parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            new = torch.zeros_like(gradient), torch.zeros_like(gradient), 0
            mean, square, steps = self._moments.get(parameter, new)
            steps += 1
            mean.lerp_(gradient, 1 - beta)
            square.lerp_(gradient.square(), 1 - beta2)
            self._moments[parameter] = mean, square, steps
            scale = (square / (1 - beta2**steps)).sqrt_().add_(1e-8)
            torch.div(mean / (1 - beta**steps), scale, out=gradient)

    def _averages(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        if not tensors:
            return []
        flat = torch.cat([each.reshape(-1) for each in tensors])
        self._transport.allreduce(flat.numpy())
        flat /= self._transport.size
        parts = flat.split([each.numel() for each in tensors])
        return [part.view_as(each) for part, each in zip(parts, tensors, strict=True)]

"""DeMo, for comparisons: momentum stays on its rank, except its largest cosine components.

Peng et al. 2024, "DeMo: Decoupled Momentum Optimization", algorithm 1.

    momentum = decay * momentum + gradient             on the rank             [n]
    Q        = the largest components of its DCT       chunk by chunk          [chunks x top]
    momentum = momentum - inverse DCT of Q             stays on the rank       [n]
    update   = sign(inverse DCT of the mean of all Q)  where a component was sent

A matrix has chunks of 64 x 64, or of the largest smaller divisors of its sides; a vector's chunks
have 64 values. An entry is sent as bfloat16 with a 16-bit index, all parameters in one allgather.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import numpy as np
import torch

from collectives.transports import Transport

from .low_rank import Cost, ExchangingOptimizer

CHUNK: Final = 64
DECAY: Final = 0.999


class Chunks:
    """One parameter's chunks, each with the components of its cosine transform in a row."""

    def __init__(self, parameter: torch.nn.Parameter, top: int) -> None:
        length = parameter.numel()
        rows = parameter.shape[0] if parameter.dim() > 1 else 1
        self.sides = rows, length // rows
        high, wide = self.chunk = _divisor(self.sides[0]), _divisor(self.sides[1])
        self.bases = cosines(high), cosines(wide)
        self.count = length // (high * wide)
        self.top = min(top, high * wide)

    def components(self, values: torch.Tensor) -> torch.Tensor:
        """Return the transform, [chunks x size of a chunk], of values of the parameter's shape."""
        (rows, columns), (high, wide) = self.sides, self.chunk
        blocks = values.reshape(rows // high, high, columns // wide, wide).transpose(1, 2)
        return (self.bases[0] @ blocks @ self.bases[1].T).reshape(self.count, high * wide)

    def values(self, components: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Return the values of the parameter's shape that have these components."""
        (rows, columns), (high, wide) = self.sides, self.chunk
        blocks = components.reshape(rows // high, columns // wide, high, wide)
        return (self.bases[0].T @ blocks @ self.bases[1]).transpose(1, 2).reshape(shape)


class DecoupledMomentum(ExchangingOptimizer):
    """An optimizer whose gradients are the signs that DeMo's exchange agrees on.

    top: components to send per chunk; 32 in the paper's trainings.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        top: int,
        transport: Transport,
    ) -> None:
        super().__init__(inner, named_parameters, transport)
        self._chunks = [Chunks(each, top) for each in self._parameters]
        self._momenta = [torch.zeros_like(each) for each in self._parameters]

    @torch.no_grad()
    def step(self) -> None:
        """Exchange the largest components, and step by the signs of their mean."""
        before = self._transport.traffic.sent_bytes
        message = torch.cat([self._select(number) for number in range(len(self._parameters))])
        messages = self._transport.allgather(message.numpy().view(np.uint8))
        self._apply(torch.from_numpy(np.stack(messages).view(np.int16)))
        self._inner.step()
        sent = self._transport.traffic.sent_bytes - before
        everything = sum(parameter.numel() for parameter in self._parameters)
        self.last_step = Cost(len(message) // 2, everything, sent)

    def _select(self, number: int) -> torch.Tensor:
        """Return a parameter's part of the message: int16, the values' bits and the indices."""
        parameter, momentum = self._parameters[number], self._momenta[number]
        chunks = self._chunks[number]
        momentum.mul_(DECAY)
        if parameter.grad is not None:
            momentum.add_(parameter.grad)
        components = chunks.components(momentum)
        indices = components.abs().topk(chunks.top, dim=1).indices
        values = components.gather(1, indices).bfloat16()
        sent = torch.zeros_like(components).scatter_(1, indices, values.float())
        momentum.sub_(chunks.values(sent, parameter.shape))
        return torch.cat([values.view(torch.int16).flatten(), indices.short().flatten()])

    def _apply(self, messages: torch.Tensor) -> None:
        """Set the gradients from all ranks' messages."""
        begin = 0
        for parameter, chunks in zip(self._parameters, self._chunks, strict=True):
            entries = chunks.count * chunks.top
            parts = messages[:, begin : begin + 2 * entries]
            begin += 2 * entries
            total = torch.zeros(chunks.count, math.prod(chunks.chunk))
            senders = torch.zeros_like(total)
            for part in parts.reshape(-1, 2, chunks.count, chunks.top):
                indices = part[1].long()
                total.scatter_add_(1, indices, part[0].view(torch.bfloat16).float())
                senders.scatter_add_(1, indices, torch.ones(indices.shape))
            total /= senders.clamp(min=1.0)  # the mean of those that were sent, as published
            parameter.grad = chunks.values(total, parameter.shape).sign()


def cosines(size: int) -> torch.Tensor:
    """Return the orthonormal DCT-II of `size` values, [components x values]."""
    component = torch.arange(size, dtype=torch.float64)[:, None]
    place = torch.arange(size, dtype=torch.float64)[None, :] + 0.5
    basis = torch.cos(math.pi / size * component * place) * math.sqrt(2.0 / size)
    basis[0] /= math.sqrt(2.0)
    return basis.float()


def _divisor(length: int) -> int:
    return next(size for size in range(min(CHUNK, length), 0, -1) if length % size == 0)

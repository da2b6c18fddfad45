"""Adam's moments of this rank's own gradients, applied before the selection.

    m = beta1 m + (1 - beta1) w g        w: this rank's weight in the sum, g: its mean gradient
    v = beta2 v + (1 - beta2) w g^2
    w u = m' / (sqrt(v' / w) + eps)      m', v': after bias correction (Kingma and Ba 2015)

So u is the step that Adam would take from this rank's gradients alone, and the sum over ranks is
the weighted mean of these steps (Chen et al. 2021, Quantized Adam with Error Feedback; they
quantize where this selects entries). Steps are selected, exchanged and kept in the residual instead
of gradients. So entries compete by how far they move a parameter, whatever the scale of its layer's
gradients, and a delayed step moves the parameter as far as it would have in time. Adam after the
selection would divide accumulated gradients by their own size: one step in place of many.

Both moments include the weight w, so those of several ranks add up to the moments of one rank in
their place. Bias correction uses a parameter's age: the number of steps in which this rank had a
gradient for it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Final

import torch

EPS: Final = 1e-8
_PIECE: Final = 1 << 16  # fits in a cache with its moments


def make_adam_step(
    gradient: torch.Tensor,
    share: float,
    moments: Sequence[torch.Tensor],
    sizes: Sequence[int],
    betas: tuple[float, float],
) -> None:
    """Turn a weighted gradient, [n], of p parameters side by side into Adam's weighted step.

    Updates the gradient and the moments in place.

    share: this rank's weight in the sum, above 0.
    moments: m and v, of the gradient's dtype, [n]; ages, int64 [p], on the host.
    sizes: of the parameters.
    """
    first, second, ages = moments
    ages.add_(1)
    # Neighbours of equal age (usually all parameters) share a bias: process them in one call.
    runs = [
        (age, sum(size for _, size in group))
        for age, group in itertools.groupby(
            zip(ages.tolist(), sizes, strict=True), key=lambda each: each[0]
        )
    ]
    lengths = [length for _, length in runs]
    parts = (each.split(lengths) for each in (gradient, first, second))
    for (age, _), *vectors in zip(runs, *parts, strict=True):
        _make_step(age, share, vectors, betas)


def _make_step(
    age: int, share: float, vectors: Sequence[torch.Tensor], betas: tuple[float, float]
) -> None:
    """vectors: gradient, m and v of parameters of the same age."""
    beta1, beta2 = betas
    bias1, bias2 = 1.0 - beta1**age, 1.0 - beta2**age
    length = _PIECE if vectors[0].device.type == "cpu" else max(1, vectors[0].numel())
    for g, m, v in zip(*(each.split(length) for each in vectors), strict=True):
        m.lerp_(g, 1.0 - beta1)
        # g is w times the mean gradient, so its square over w is the formula's w g^2.
        v.mul_(beta2).addcmul_(g, g, value=(1.0 - beta2) / share)
        # From here on the gradient's memory holds the step. Put the bias of m into the divisor:
        # one pass less than dividing m by it.
        torch.sqrt(v, out=g)
        g.mul_(bias1 / math.sqrt(bias2 * share)).add_(bias1 * EPS)
        torch.div(m, g, out=g)

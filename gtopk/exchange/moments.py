"""Adam's moments of this rank's own gradients, applied before the selection.

    m = beta1 m + (1 - beta1) w g        w: this rank's share of the sum, g: its mean gradient
    v = beta2 v + (1 - beta2) w g^2
    w u = m' / (sqrt(v' / w) + eps)      m', v': less their bias to zero (Kingma and Ba 2015)

So u is the step that Adam would take by this rank's gradients alone, and the sum over ranks is the
mean of these, by their shares (Chen et al. 2021, Quantized Adam with Error Feedback; where they
quantize, entries are selected here). Steps are selected, exchanged and kept in the residual, not
gradients. So entries compete by how far they move a parameter, at any scale of its layer's
gradients, and a step that waited long moves it as far as it would have in time. Adam after a
selection would divide gathered gradients by their own size: one step in place of many.

Both moments carry the share, so those of several ranks add up to the moments of one rank in their
place. Bias follows from a parameter's age: in how many steps this rank's gradients trained it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Final

import torch

EPS: Final = 1e-8
_PIECE: Final = 1 << 16  # fits a cache with its moments


def make_adam_step(
    gradient: torch.Tensor,
    share: float,
    moments: Sequence[torch.Tensor],
    sizes: Sequence[int],
    betas: tuple[float, float],
) -> None:
    """Turn a weighted gradient, [n], of p parameters side by side into Adam's weighted step.

    In place, as are the changes of the moments.

    share: of this rank in the sum, above 0.
    moments: m and v, of the gradient's dtype, [n]; ages, int64 [p], on the host.
    sizes: of the parameters.
    """
    first, second, ages = moments
    ages.add_(1)
    # One age means one bias: such neighbours, mostly all parameters, are worked on in one call.
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
    """vectors: gradient, m and v, of parameters of one age."""
    beta1, beta2 = betas
    bias1, bias2 = 1.0 - beta1**age, 1.0 - beta2**age
    length = _PIECE if vectors[0].device.type == "cpu" else max(1, vectors[0].numel())
    for g, m, v in zip(*(each.split(length) for each in vectors), strict=True):
        m.lerp_(g, 1.0 - beta1)
        # g is w times the mean gradient: its square, over w, is the w g^2 of the formula.
        v.mul_(beta2).addcmul_(g, g, value=(1.0 - beta2) / share)
        # The gradient's memory holds the step from here on. The bias of m goes below the line: one
        # pass less than to divide m by it.
        torch.sqrt(v, out=g)
        g.mul_(bias1 / math.sqrt(bias2 * share)).add_(bias1 * EPS)
        torch.div(m, g, out=g)

"""Moments: Adam's, of this rank's own gradients, before anything is selected.

    m = beta1 m + (1 - beta1) w g        w: this rank's share of the sum, g: its mean gradient
    v = beta2 v + (1 - beta2) w g^2
    w u = m' / (sqrt(v' / w) + eps)      m', v': less their bias to zero (Kingma and Ba 2015)

So u is the step that Adam would take by this rank's gradients alone, and the sum over ranks is the
mean of these, by their shares (Chen et al. 2021, Quantized Adam with Error Feedback; where they
quantize, entries are selected here). What is selected, exchanged and held back are steps, not
gradients: entries compete by how far they move a parameter, whatever its layer's gradients measure,
and what has gathered for long moves it as far as it would have in between. Adam behind a selection
would divide it by its own size, and take one step for many.

Both moments carry the share, so that those of several ranks add up to what one rank in their place
would have.
"""

from __future__ import annotations

import math
from typing import Final

import torch

EPS: Final = 1e-8
_PIECE: Final = 1 << 16  # fits a cache with its moments


class Moments:
    """Makes Adam's steps of gradients, [n].

    first, second: m and v, of the gradients' dtype, [n], changed in place.
    """

    def __init__(
        self, first: torch.Tensor, second: torch.Tensor, betas: tuple[float, float]
    ) -> None:
        self._first, self._second, self._betas = first, second, betas

    def direct(self, gradient: torch.Tensor, share: float, steps: int) -> None:
        """Make a weighted gradient, [n], in place, the weighted step.

        share: of this rank in the sum; 0: it has no gradient, and its moments stay. steps: taken
        before this one.
        """
        if not share:
            return
        beta1, beta2 = self._betas
        bias1, bias2 = 1.0 - beta1 ** (steps + 1), 1.0 - beta2 ** (steps + 1)
        length = _PIECE if gradient.device.type == "cpu" else max(1, gradient.numel())
        pieces = (each.split(length) for each in (gradient, self._first, self._second))
        for part, first, second in zip(*pieces, strict=True):
            first.lerp_(part, 1.0 - beta1)
            second.mul_(beta2).addcmul_(part, part, value=(1.0 - beta2) / share)
            torch.sqrt(second, out=part)
            part.mul_(bias1 / math.sqrt(bias2 * share)).add_(bias1 * EPS)
            torch.div(first, part, out=part)

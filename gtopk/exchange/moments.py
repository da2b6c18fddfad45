"""AdamMoments: Adam's moments of this rank's own gradients, applied before the selection.

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
from collections.abc import Iterator, Sequence
from typing import Final

import torch

EPS: Final = 1e-8
_PIECE: Final = 1 << 16  # fits a cache with its moments


class AdamMoments:
    """Turns gradients, [n], of p parameters side by side into Adam's steps.

    first, second: m and v, of the gradients' dtype, [n]; ages: int64 [p], on the host. All are
        changed in place.
    sizes: of the parameters.
    """

    def __init__(
        self,
        first: torch.Tensor,
        second: torch.Tensor,
        ages: torch.Tensor,
        sizes: Sequence[int],
        betas: tuple[float, float],
    ) -> None:
        self._first, self._second, self._ages = first, second, ages
        self._sizes, self._betas = list(sizes), betas

    def make_step(self, gradient: torch.Tensor, share: float) -> None:
        """Turn a weighted gradient, [n], into the weighted step, in place.

        share: of this rank in the sum; 0: it has no gradient, and its moments stay.
        """
        if not share:
            return
        self._ages.add_(1)
        ages, lengths = zip(*self._alike(), strict=True)
        parts = (each.split(lengths) for each in (gradient, self._first, self._second))
        for age, g, m, v in zip(ages, *parts, strict=True):
            self._make_step(age, share, g, m, v)

    def _alike(self) -> Iterator[tuple[int, int]]:
        """Return runs of neighbouring parameters of one age: the age, and how many elements."""
        # One age means one bias: such neighbours, mostly all parameters, are worked on in one call.
        each = zip(self._ages.tolist(), self._sizes, strict=True)
        for age, group in itertools.groupby(each, key=lambda one: one[0]):
            yield age, sum(size for _, size in group)

    def _make_step(
        self,
        age: int,
        share: float,
        gradient: torch.Tensor,
        first: torch.Tensor,
        second: torch.Tensor,
    ) -> None:
        beta1, beta2 = self._betas
        bias1, bias2 = 1.0 - beta1**age, 1.0 - beta2**age
        length = _PIECE if gradient.device.type == "cpu" else max(1, gradient.numel())
        pieces = (each.split(length) for each in (gradient, first, second))
        for g, m, v in zip(*pieces, strict=True):
            m.lerp_(g, 1.0 - beta1)
            # g is w times the mean gradient: its square, over w, is the w g^2 of the formula.
            v.mul_(beta2).addcmul_(g, g, value=(1.0 - beta2) / share)
            # The gradient's memory holds the step from here on. The bias of m goes below the line:
            # one pass less than to divide m by it.
            torch.sqrt(v, out=g)
            g.mul_(bias1 / math.sqrt(bias2 * share)).add_(bias1 * EPS)
            torch.div(m, g, out=g)

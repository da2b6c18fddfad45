"""Weights: what a rank's gradients are multiplied with before anything else."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from collectives.kernels import squared_norm, squared_norms

from ..exchange.buckets.arrays import current_stream, home_of, located, view_array


class LocalClip:
    """Shortens a rank's part of a sum to the norm allowed; knows the part's own norm.

    gradients: of this rank; scale: what they are multiplied with, and norms are meant without.
    allowed_norm: of the sum, were the ranks' gradients independent.
    allowed_mean: of the mean gradient, whose squares are `ratio` of those of this rank's.
    """

    def __init__(
        self,
        gradients: Iterable[torch.Tensor | None],
        allowed_norm: float | None,
        scale: float = 1.0,
        allowed_mean: float | None = None,
        ratio: float = 1.0,
    ) -> None:
        self._allowed_norm, self._norm = allowed_norm, 0.0
        self._allowed_mean, self._ratio = allowed_mean, ratio
        if allowed_norm is not None or allowed_mean is not None:
            self._norm = norm_of([each for each in gradients if each is not None]) / scale

    def factor(self, weight: float, share: float) -> float:
        """Return what shortens weight * gradients to the lesser of the norms that are allowed.

        share: of this rank in the sum; all ranks' add up to 1. Independent gradients of sqrt(share)
        of the norm allowed have that as a sum: with 1/ranks each, Lin et al. 2018, section 3.2.
        What is not finite is not shortened: the step is skipped.
        """
        norm = weight * self._norm
        if not 0.0 < norm < math.inf:
            return 1.0
        allowed = math.inf
        if self._allowed_norm is not None:
            allowed = self._allowed_norm * math.sqrt(share)
        if self._allowed_mean is not None:
            allowed = min(allowed, self._allowed_mean * share / math.sqrt(self._ratio))
        return min(1.0, allowed / norm)


def norm_of(tensors: Sequence[torch.Tensor]) -> float:
    """Return the Euclidean norm of all their values, of whatever dtypes, coalesced where sparse.

    Not finite where a value is not. 16-bit values are added in float32, and what overflows there in
    float64, which takes a CPU thirty times as long.
    """
    parts = [t.detach().coalesce()._values() if t.is_sparse else t.detach() for t in tensors]

    def norm(least: torch.dtype) -> float:
        wide = [torch.promote_types(part.dtype, least) for part in parts]
        norms: dict[torch.device, list[torch.Tensor]] = {}
        for part, dtype in zip(parts, wide, strict=True):
            one = torch.linalg.vector_norm(part, dtype=dtype).double()
            norms.setdefault(part.device, []).append(one)
        # One wait for each device.
        return math.hypot(*(float(torch.stack(each).norm()) for each in norms.values()))

    found = norm(torch.float32)
    return norm(torch.float64) if found == math.inf else found


def agreed_norm(tensors: Sequence[torch.Tensor]) -> float:
    """Return the norm of what is the same on all ranks: it is then, to the bit, the same on each.

    The kernels add in float64 and in one order, on any processor and any GPU; torch's sums go by
    its instructions, and two ranks' norms may differ in the last bit.
    """
    home = home_of(tensors)
    with current_stream(home)():
        flat = []
        for tensor in tensors:
            part = tensor.detach().coalesce()._values() if tensor.is_sparse else tensor.detach()
            if home.type == "cpu":
                part = part.to(home, torch.promote_types(part.dtype, torch.float32))
            flat.append(part.reshape(-1).contiguous())
        if home.type == "cpu":
            squares = [squared_norm(view_array(part)) if part.numel() else 0.0 for part in flat]
        else:
            squares = _squares_on_gpu(flat)
    return math.sqrt(sum(squares))


def _squares_on_gpu(tensors: Sequence[torch.Tensor]) -> list[float]:
    """Return each tensor's sum of squares; one launch and one wait for those of one dtype."""
    squares = [0.0] * len(tensors)
    for dtype in {tensor.dtype for tensor in tensors}:
        places = [at for at, tensor in enumerate(tensors) if tensor.dtype == dtype]
        for at, square in zip(
            places, squared_norms(located([tensors[at] for at in places])), strict=True
        ):
            squares[at] = square
    return squares

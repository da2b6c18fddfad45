"""The gradient noise scale, from the gradients of unequal batches.

With weights w_i = b_i/B and mean gradients g_i of the P ranks that had samples,

    L = sum w_i |g_i|^2,   N = |sum w_i g_i|^2,
    variance = (L - N) B / (P - 1),   square = (P N - L) / (P - 1)

are unbiased for the trace of one sample's covariance and the square of the true gradient, whatever
the b_i; with equal ones they are McCandlish et al. 2018 (arXiv 1812.06162), appendix A.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import torch

from .throughput import weak_hook

REMEMBERED: Final = 0.8  # weight of the old averages at every new probe
SURE: Final = 0.6  # weight of the averages to rely on: reached after five probes


class Noise(NamedTuple):
    """The gradient noise: how much the gradients of samples differ.

    variance: the trace of one sample's covariance.
    square:   |G|^2 of the true gradient.
    """

    variance: float
    square: float

    @property
    def scale(self) -> float:
        """Return B_simple: the batch beyond which more samples buy little."""
        return self.variance / self.square if self.square > 0 else float("inf")


def estimate(weighted_squares: float, square_of_mean: float, sizes: Sequence[int]) -> Noise:
    """Return the unbiased estimate, from L and N; raise ValueError for fewer than two ranks."""
    ranks = sum(size > 0 for size in sizes)
    if ranks < 2:
        raise ValueError(f"the noise is told from two ranks with samples or more, got {ranks}")
    return Noise(
        (weighted_squares - square_of_mean) * sum(sizes) / (ranks - 1),
        (ranks * square_of_mean - weighted_squares) / (ranks - 1),
    )


class NoiseAverage:
    """Averages variance and square separately: an average of their quotients would be biased."""

    def __init__(self) -> None:
        self._variance = self._square = self._weight = 0.0

    def add(self, noise: Noise) -> None:
        """Add one more estimate."""
        # The weight is averaged, too: dividing by it takes out the zeros that averages begin with.
        for name, value in (("variance", noise.variance), ("square", noise.square), ("weight", 1)):
            old = getattr(self, f"_{name}")
            setattr(self, f"_{name}", REMEMBERED * old + (1 - REMEMBERED) * value)

    @property
    def value(self) -> Noise | None:
        """Return the averages, neither below zero; None before the first estimate."""
        if not self._weight:
            return None
        # Unbiased estimates of something small are below zero now and then.
        return Noise(max(self._variance / self._weight, 0.0), max(self._square / self._weight, 0.0))

    @property
    def is_sure(self) -> bool:
        """Tell whether there were enough estimates to rely on."""
        return self._weight >= SURE

    def state_dict(self) -> dict[str, Any]:
        return {"variance": self._variance, "square": self._square, "weight": self._weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Adopt another object's averages."""
        self._variance, self._square = state["variance"], state["square"]
        self._weight = state["weight"]


class GradientCopy:
    """A copy of one backward pass's gradients, before anything is added to or made of them.

    parameters: those trained at the start; one that is frozen later still counts.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._places: dict[torch.Tensor, int] = {}
        self._scale = 1.0
        self._copies: dict[int, torch.Tensor] | None = None
        self._watch(parameters)

    def arm(self, parameters: Iterable[torch.Tensor], scale: float = 1.0) -> None:
        """Copy the next backward pass.

        parameters: those trained by now. scale: the factor of the loss.
        """
        self._watch(parameters)
        self._scale, self._copies = scale, {}

    def _watch(self, parameters: Iterable[torch.Tensor]) -> None:
        take = weak_hook(self._take)
        for parameter in parameters:
            # A second hook would copy the gradient twice.
            if parameter not in self._places:
                place = self._places[parameter] = len(self._places)
                parameter.register_hook(partial(take, place))

    def _take(self, place: int, gradient: torch.Tensor) -> None:
        if self._copies is not None:
            # In float64: the variance is the difference of two sums that are nearly equal.
            copy = gradient.detach().to("cpu", torch.float64, copy=True)
            self._copies[place] = copy.to_dense()  # an embedding's may be sparse

    def disarm(self) -> torch.Tensor | None:
        """Return the copy, float64 [n], of all parameters ever trained; None where not armed.

        It holds zeros where there was no gradient.
        """
        copies, self._copies = self._copies, None
        if copies is None:
            return None
        parts = [
            copies[place].reshape(-1)
            if place in copies
            else torch.zeros(parameter.numel(), dtype=torch.float64, device="cpu")
            for parameter, place in self._places.items()
        ]
        return torch.cat(parts).div_(self._scale)

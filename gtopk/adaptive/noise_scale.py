"""The gradient noise scale, from the gradients of unequal batches.

With weights w_i = b_i/B and mean gradients g_i of the P ranks that had samples,

    L = sum w_i |g_i|^2,   N = |sum w_i g_i|^2,
    variance = (L - N) B / (P - 1),   square = (P N - L) / (P - 1)

are unbiased for the trace of one sample's covariance and the square of the true gradient, for any
b_i. With equal b_i they are the estimates of McCandlish et al. 2018 (arXiv 1812.06162), appendix A.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import torch

from .throughput import weak_hook

DECAY: Final = 0.8  # weight of the old averages at each new probe
RELIABLE_WEIGHT: Final = 0.6  # averages of this weight are reliable: reached after five probes


class Noise(NamedTuple):
    """The gradient noise: how much the gradients of single samples differ.

    variance: the trace of one sample's covariance.
    square:   |G|^2 of the true gradient.
    """

    variance: float
    square: float

    @property
    def scale(self) -> float:
        """Return B_simple: the batch size beyond which more samples help little."""
        return self.variance / self.square if self.square > 0 else float("inf")


def estimate(weighted_squares: float, square_of_mean: float, sizes: Sequence[int]) -> Noise:
    """Return the unbiased estimate from L and N; raise ValueError for fewer than two ranks."""
    ranks = sum(size > 0 for size in sizes)
    if ranks < 2:
        raise ValueError(f"the gradient noise needs at least two ranks with samples, got {ranks}")
    return Noise(
        (weighted_squares - square_of_mean) * sum(sizes) / (ranks - 1),
        (ranks * square_of_mean - weighted_squares) / (ranks - 1),
    )


class NoiseAverage:
    """Running averages of the noise: `add` each probe, read `value`, rely on it if `is_reliable`.

    Variance and square are averaged separately: an average of their quotients would be biased.
    """

    def __init__(self) -> None:
        self._variance = self._square = self._weight = 0.0

    def add(self, noise: Noise) -> None:
        """Add one more estimate."""
        # The weight is averaged too: dividing by it corrects for the zeros that averages start
        # with.
        for name, value in (("variance", noise.variance), ("square", noise.square), ("weight", 1)):
            old = getattr(self, f"_{name}")
            setattr(self, f"_{name}", DECAY * old + (1 - DECAY) * value)

    @property
    def value(self) -> Noise | None:
        """Return the averages, clamped at zero; None before the first estimate."""
        if not self._weight:
            return None
        # Unbiased estimates of a small number are sometimes negative.
        return Noise(max(self._variance / self._weight, 0.0), max(self._square / self._weight, 0.0))

    @property
    def is_reliable(self) -> bool:
        """Tell whether the averages are reliable after enough estimates."""
        return self._weight >= RELIABLE_WEIGHT

    def state_dict(self) -> dict[str, Any]:
        return {"variance": self._variance, "square": self._square, "weight": self._weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with another object's averages."""
        self._variance, self._square = state["variance"], state["square"]
        self._weight = state["weight"]


class GradientCopy:
    """A copy of one backward pass's gradients, before other hooks and the optimizer use them.

    Call `arm` before the pass and `disarm` after it.

    parameters: the ones trained at the start; one that is frozen later still counts.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._places: dict[torch.Tensor, int] = {}
        self._scale = 1.0
        self._copies: dict[int, torch.Tensor] | None = None
        self._watch(parameters)

    def arm(self, parameters: Iterable[torch.Tensor], scale: float = 1.0) -> None:
        """Copy the next backward pass.

        parameters: the ones trained now. scale: the factor of the loss.
        """
        self._watch(parameters)
        self._scale, self._copies = scale, {}

    def _watch(self, parameters: Iterable[torch.Tensor]) -> None:
        copy_gradient = weak_hook(self._copy_gradient)
        for parameter in parameters:
            # A second hook would copy the gradient twice.
            if parameter not in self._places:
                place = self._places[parameter] = len(self._places)
                parameter.register_hook(partial(copy_gradient, place))

    def _copy_gradient(self, place: int, gradient: torch.Tensor) -> None:
        if self._copies is not None:
            # In float64: the variance is a difference of two nearly equal sums.
            copy = gradient.detach().to("cpu", torch.float64, copy=True)
            self._copies[place] = copy.to_dense()  # an embedding's may be sparse

    def disarm(self) -> torch.Tensor | None:
        """Return the copy, float64 [n], of all parameters ever trained; None if not armed.

        Parameters without a gradient are zeros.
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

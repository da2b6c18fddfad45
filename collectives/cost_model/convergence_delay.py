"""Lag: how many steps later a method that updates few coordinates is where dense would be.

Error feedback loses nothing, but its residual is applied later. Let coordinate i gain g_i a
step, and be sent when it has gathered the threshold t, every t / g_i steps:

    sum over i of g_i / t = updated        so t is the gradient's sum over `updated`
    each holds back t / 2 on average       all of them n t / 2 = n / (2 updated) gradients

So the model is as if it had taken that many steps less; half a step of these are dense's own. The
lag is one of steps, not a factor: it matters in a short training and not in a long one. Gradients
that cancel out wait for less: it is an upper bound, of which
docs/measured/convergence.md has measured shares.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple


def lag_steps(length: int, updated: float) -> float:
    """Return it for updates of so many coordinates out of `length`."""
    return (length / updated - 1.0) / 2.0


class Training(NamedTuple):
    """What a reduction is a part of.

    steps:             of the whole training.
    elsewhere_seconds: of each step, besides what this reduction adds to it.
    room_seconds:      of each step, in which the reduction hides; it adds what it takes beyond.
    share:             of the model's coordinates that this reduction is of; the rest has its own.
    """

    steps: float = math.inf
    elsewhere_seconds: float = 0.0
    share: float = 1.0
    room_seconds: float = 0.0

    def exposed(self, seconds: float) -> float:
        """Return by how much a reduction lengthens a step."""
        return max(0.0, seconds - self.room_seconds)

    def cost(self, seconds: float, lag_steps: float) -> float:
        """Return that, and the steps that the reduction's lag adds spread over all."""
        exposed = self.exposed(seconds)
        added = self.share * lag_steps / self.steps
        return exposed + added * (self.elsewhere_seconds + exposed)


WITHOUT_END: Final = Training()

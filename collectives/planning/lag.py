"""Lag: how many steps later a method that updates few coordinates is where dense would be.

Error feedback loses nothing, but what it holds back is applied later. Let coordinate i gain g_i a
step, and be sent when it has gathered the threshold t, every t / g_i steps:

    sum over i of g_i / t = updated        so t is the gradient's sum over `updated`
    each holds back t / 2 on average       all of them n t / 2 = n / (2 updated) gradients

So the model is as if it had taken that many steps less; half a step of these are dense's own. The
lag is one of steps, not a factor: it matters in a short training and not in a long one. Gradients
that cancel out wait for less: it is an upper bound, of which docs/tuning.md shows measured shares.
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
    elsewhere_seconds: of each step, outside of this reduction.
    share:             of the model's coordinates that this reduction is of; the rest has its own.
    """

    steps: float = math.inf
    elsewhere_seconds: float = 0.0
    share: float = 1.0

    def cost(self, seconds: float, lag_steps: float) -> float:
        """Return the seconds of a reduction, and the steps that its lag adds spread over all."""
        added = self.share * lag_steps / self.steps
        return seconds + added * (self.elsewhere_seconds + seconds)


WITHOUT_END: Final = Training()

"""Draining: how a residual leaves where gradients are sent whole, without a jolt.

What sparse steps have left is the sum of many steps' gradients. Sent in one step, it moves the
model as far as all of these steps at once, and momentum carries on with it: a model that had nearly
converged is thrown off. So each step sends a share of it half as long as that step's own gradient:

    residual   |e|  ..|..|..|..      two gradients long: gone after four steps
    sent            |g|/2 each       beside a gradient of |g|

Whatever direction it has, their sum points downhill still: <g, g + s> >= |g|^2 / 2. Nothing is lost
on the way: what is not sent yet, or 16 bits cannot hold of the sum, stays in the residual.
"""

from __future__ import annotations

import math
from typing import Final

PART: Final = 0.5  # of the gradient's length
# However short gradients are, nothing of it is left after so many steps.
MOST_STEPS: Final = 1000


def share_to_send(held_square: float, gradient_square: float, steps: int) -> float:
    """Return the share of the residual to send now.

    held_square, gradient_square: squared norms, of the residual and of what is sent in any case.
    steps: that have sent a share of it already.
    """
    if not held_square:
        return 1.0
    ratio = PART * math.sqrt(gradient_square / held_square)
    if not math.isfinite(ratio):
        return 0.0  # the step will not count
    return min(1.0, max(ratio, 1.0 / max(1, MOST_STEPS - steps)))

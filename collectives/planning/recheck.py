"""Recheck: whether the links still are what a kept calibration says, by a few short reductions.

Between hosts only: there may be another network by now, another route, another shaper. It takes a
tenth of a second where the links hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from ..transports.transport import Transport
from .calibration import Calibration
from .prediction import Candidate, Prediction, predict
from .probes import Clock, agree_on_mean

WRONG: Final = 2.0  # times what was expected, or one part of it
NEGLIGIBLE_SECONDS: Final = 5e-3  # hosts that are busy take as much longer now and then
LONG_SECONDS: Final = 0.02  # of a reduction that tells of the bandwidth
GOES: Final = 3  # of which the shortest counts
_MANY: Final = 1 << 22  # values


def still_holds(transport: Transport, calibration: Calibration, clock: Clock) -> bool:
    """Tell whether reductions take what they should; every rank must call it, and is told alike."""
    network = calibration.network
    if network.is_one_node:
        return True

    def should_take(length: int) -> Prediction:
        return predict(Candidate("dense"), length, network, calibration.rates)

    def is_right(go: Callable[[], object], expected_seconds: float) -> bool:
        seconds: list[float] = []
        while len(seconds) < GOES and sum(seconds) < 2 * LONG_SECONDS:
            begun = clock()
            go()
            seconds.append(agree_on_mean(transport, clock() - begun))
        off = abs(min(seconds) - expected_seconds)
        return (
            off <= NEGLIGIBLE_SECONDS
            or expected_seconds / WRONG <= min(seconds) <= expected_seconds * WRONG
        )

    many = should_take(_MANY)
    each = (many.communicate_seconds - many.latency_seconds) / _MANY
    # Most of it beyond what a token bucket lets pass at once.
    past_burst = 2 * network.between.burst_bytes / np.float32().itemsize
    length = max(LONG_SECONDS / each if each else 0.0, past_burst)
    array = np.zeros(max(1, min(_MANY, round(length))), np.float32)
    return is_right(transport.barrier, network.expected_agreement_seconds) and is_right(
        lambda: transport.allreduce(array), should_take(array.size).communicate_seconds
    )

"""ExpectedStep: what a step's exchange is to take, once all ranks have measured their links."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from collectives.planning import Calibration
from collectives.transports import Transport

from ..exchange.calibration import calibration_of
from ..exchange.exchange import Progress
from . import advice
from .expectation import expected_seconds
from .peers import Peers
from .rounds import AnyLane

_log = logging.getLogger("gtopk")


class ExpectedStep:
    """That of an optimizer; nothing is expected before `measure`."""

    def __init__(self, compression: Any, progress: Progress) -> None:
        self._compression = compression
        self._progress = progress
        self._seconds: float | None = None

    def measure(self, lanes: Sequence[AnyLane], peers: Peers) -> None:
        """Expect what these lanes will take; rank 0 says, once in a world, what compressing saves.

        Where all ranks want it; ranks that are threads of one process have no links to speak of.
        """
        here = peers.world
        if not peers.size == here.size > 1 or here.transport.name == "local":
            return

        def calibrate(transport: Transport, votes: list[int]) -> Calibration | None:
            return calibration_of(transport) if all(votes) else None

        calibration = peers.run("advice", [], calibrate, vote=advice.wanted())
        if calibration is None:
            return
        self._seconds = expected_seconds(lanes, calibration)
        if here.rank == 0 and not here.advised:
            here.advised = True
            elements = sum(lane.elements for lane in lanes)
            _log.info("%s", advice.advice(self._compression, elements, calibration))

    @property
    def seconds(self) -> float | None:
        """Return what it is expected to take, where that is known.

        While the density is on its way to what was asked for, it is not.
        """
        warming = getattr(self._compression, "warmup_steps", 0) > self._progress.steps
        return None if warming else self._seconds

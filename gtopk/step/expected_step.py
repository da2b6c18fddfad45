"""ExpectedStep: what a step's exchange is to take, once all ranks have measured their links."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from collectives.planning import Calibration
from collectives.transports import Transport

from .. import settings
from ..compression import GTopK, usual_density
from ..exchange.bucket_exchange import BucketExchange
from ..exchange.calibration import calibration_of
from ..exchange.exchange import Progress
from ..telemetry import Sized
from ..world.state import World
from . import advice
from .bucket_plan import buckets_by
from .expectation import expected_seconds, in_question
from .peers import Peers


class ExpectedStep:
    """That of one way to train; nothing is expected before `measure`.

    per: what an exchange ends.
    beyond: what runs that the model knows nothing of; "": gradients are reduced by compression.
    is_planned: whether buckets are those of `bucket_plan`, by what a compression sends: if all
            travelled whole, they would be others.
    """

    def __init__(
        self,
        compression: Any,
        progress: Progress,
        per: str = "step",
        beyond: str = "",
        *,
        is_planned: bool = False,
    ) -> None:
        self._compression = compression
        self._progress = progress
        self._per = per
        self._beyond = beyond
        self._is_planned = is_planned
        self._calibration: Calibration | None = None
        self._seconds: float | None = None

    def measure(self, bucket_exchanges: Sequence[Sized], peers: Peers) -> None:
        """Expect what these buckets will take; rank 0 says, once a world, what compressing saves.

        All peers call it together. Where all of them want it; ranks that are threads of one process
        have no links to speak of. Groups that exchange side by side measure side by side, too, and
        so share links as they do in every step.
        """
        self._calibration = self._seconds = None
        here = peers.world
        if not peers.takes_part or peers.size < 2 or here.transport.name == "local":
            return

        homes = [
            bucket_exchange.bucket.device
            for bucket_exchange in bucket_exchanges
            if isinstance(bucket_exchange, BucketExchange)
        ]
        home = homes[0] if homes else torch.device("cpu")

        def calibrate(transport: Transport, all_flags: list[int]) -> Calibration | None:
            return calibration_of(transport, home) if all(all_flags) else None

        self._calibration = peers.run("advice", [], calibrate, flags=settings.ADVICE.read())
        self.expect(bucket_exchanges)
        if self._calibration is not None and here.rank == 0 and not here.advised:
            self._say(here, bucket_exchanges, self._calibration)

    def _say(
        self, here: World, bucket_exchanges: Sequence[Sized], calibration: Calibration
    ) -> None:
        """Say it of what is compressed, else of what could be, where there is any."""
        every = [
            bucket_exchange.elements
            for bucket_exchange in bucket_exchanges
            if bucket_exchange.elements
        ]
        asked, is_compressed = ([], False) if self._beyond else in_question(bucket_exchanges)
        lengths = every if self._beyond else [bucket_exchange.elements for bucket_exchange in asked]
        if lengths:
            compression = self._compression if is_compressed else None
            others = sum(every) - sum(lengths)
            other_buckets = None
            if self._is_planned:
                parameters = [
                    each.numel()
                    for bucket_exchange in asked
                    for each in bucket_exchange.bucket.parameters
                ]
                other = None if is_compressed else GTopK(usual_density(sum(lengths)))
                other_buckets = buckets_by(other, parameters, calibration.network.ranks)
            said = advice.advice(
                compression, lengths, calibration, others, self._per, self._beyond, other_buckets
            )
            advice.say_once(here, said)

    def expect(self, bucket_exchanges: Sequence[Sized]) -> None:
        """Expect what these buckets will take from now on, where links were measured."""
        if self._calibration is not None:
            self._seconds = expected_seconds(bucket_exchanges, self._calibration)

    @property
    def seconds(self) -> float | None:
        """Return what it is expected to take, where that is known.

        While the density is on its way to what was asked for, it is not.
        """
        warming = getattr(self._compression, "warmup_steps", 0) > self._progress.steps
        return None if warming else self._seconds

"""ExpectedStep: the time that the cost model predicts for a step's exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from collectives.cost_model import Calibration
from collectives.transports import Transport

from .. import settings
from ..compression import Compression, GTopK, usual_density
from ..exchange.bucket_exchange import BucketExchange
from ..exchange.calibration import calibration_of
from ..exchange.exchange import Progress
from ..planning import advice
from ..planning.advice import (
    Sized,
    compressible_buckets,
    expected,
    expected_seconds,
    value_bytes_of,
)
from ..runtime.world.membership import World
from .bucket_plan import count_buckets
from .peers import Peers


class ExpectedStep:
    """The predicted seconds of a step's exchange. Call `measure` first; before, nothing is known.

    per: the kind of step that an exchange ends, for messages: "step" or "outer step".
    uncovered: the name of a method that the cost model does not cover; "": gradients are reduced
        with the compression.
    dense_seconds: predicted for a dense exchange; None if unknown, or if nothing is compressed.
    is_planned: whether `bucket_plan` made the buckets, in sizes that suit the compression: dense
        gradients would use other buckets.
    """

    def __init__(
        self,
        compression: Any,
        progress: Progress,
        per: str = "step",
        uncovered: str = "",
        *,
        is_planned: bool = False,
    ) -> None:
        self._compression, self._progress = compression, progress
        self._per = per
        self._uncovered = uncovered
        self._is_planned = is_planned
        self._calibration: Calibration | None = None
        self._seconds: float | None = None  # once the density has warmed up
        self.dense_seconds: float | None = None

    def measure(self, bucket_exchanges: Sequence[Sized], peers: Peers) -> None:
        """Measure links and predict these buckets; rank 0 logs, once per world, the savings.

        A collective of all peers. It measures only if all of them ask for advice (settings.ADVICE),
        and not between threads of one process, which have no links. Groups that exchange at the
        same time also measure at the same time, and so share links as in every step.
        """
        self._calibration = self._seconds = self.dense_seconds = None
        here = peers.world
        if not peers.takes_part or peers.size < 2 or here.transport.name == "local":
            return

        devices = [e.bucket.device for e in bucket_exchanges if isinstance(e, BucketExchange)]
        device = devices[0] if devices else torch.device("cpu")

        def calibrate(transport: Transport, all_flags: list[int]) -> Calibration | None:
            return calibration_of(transport, device) if all(all_flags) else None

        # Decide by every rank's flag: measuring is a collective, so all ranks must do it, or none.
        self._calibration = peers.run("advice", [], calibrate, flags=settings.ADVICE.read())
        self.expect(bucket_exchanges)
        if self._calibration is not None and here.rank == 0 and not here.advised:
            self._log_advice(here, bucket_exchanges, self._calibration)

    def _log_advice(
        self, here: World, bucket_exchanges: Sequence[Sized], calibration: Calibration
    ) -> None:
        """Log advice on the compressed gradients, or if there are none, on those that could be."""
        all_lengths = _lengths(bucket_exchanges)
        compressible, is_compressed = (
            ([], False) if self._uncovered else compressible_buckets(bucket_exchanges)
        )
        lengths = (
            all_lengths
            if self._uncovered
            else [bucket_exchange.elements for bucket_exchange in compressible]
        )
        if lengths:
            compression = self._compression if is_compressed else None
            message = advice.advice(
                compression,
                lengths,
                calibration,
                sum(all_lengths) - sum(lengths),
                self._per,
                self._uncovered,
                self._other_buckets(compressible, is_compressed, calibration),
                here.transport.library(),
                *value_bytes_of(compressible),
            )
            advice.log_once(here, message)

    def _other_buckets(
        self, compressible: Sequence[BucketExchange], is_compressed: bool, calibration: Calibration
    ) -> int | None:
        """Return how many buckets the alternative needs: dense for compressed, or the reverse."""
        if not self._is_planned or not compressible:
            return None
        parameters = [
            parameter.numel() for each in compressible for parameter in each.bucket.parameters
        ]
        sparse = GTopK(usual_density(sum(each.elements for each in compressible)))
        return count_buckets(
            None if is_compressed else sparse,
            parameters,
            calibration.network.ranks,
            on_gpu=compressible[0].bucket.device.type == "cuda",
        )

    def expect(self, bucket_exchanges: Sequence[Sized]) -> None:
        """Predict the time of these buckets from now on, if links were measured."""
        if self._calibration is None:
            return
        self._seconds = expected_seconds(bucket_exchanges, self._calibration)
        compressible, is_compressed = (
            ([], False) if self._uncovered else compressible_buckets(bucket_exchanges)
        )
        self.dense_seconds = None
        if is_compressed:
            buckets = self._other_buckets(compressible, is_compressed, self._calibration) or len(
                compressible
            )
            # Dense gradients would use buckets of other sizes; assume that all are equally long.
            length = -(-sum(_lengths(bucket_exchanges)) // buckets)
            value_bytes, _ = value_bytes_of(compressible)
            dense = expected(Compression.none, length, self._calibration, value_bytes)
            self.dense_seconds = dense.times(buckets).seconds if dense is not None else None

    @property
    def seconds(self) -> float | None:
        """Return the expected seconds of the exchange that has just ended; None if unknown.

        They are unknown while the density warms up.
        """
        warmup_steps = getattr(self._compression, "warmup_steps", 0)
        # The last warm-up step is counted before its report is made (except with FSDP).
        warmed_up = warmup_steps == 0 or self._progress.steps > warmup_steps
        return self._seconds if warmed_up else None


def _lengths(bucket_exchanges: Sequence[Sized]) -> list[int]:
    """Return the number of values of each bucket that has any."""
    return [each.elements for each in bucket_exchanges if each.elements]

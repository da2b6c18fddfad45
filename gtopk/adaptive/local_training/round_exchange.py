"""RoundExchange: a round's sums of gradients, through the optimizer's method, with a residual."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from collectives.algorithms import Regions
from collectives.ranges import profiled
from collectives.transports import Transport

from ...compression import ErrorFeedback, Shards
from ...exchange.buckets.arrays import view_tensor
from ...exchange.buckets.buckets import Bucket
from ...exchange.exchange import Exchanged, Progress, SparseExchange
from ...exchange.exchanges import open_exchange
from ...exchange.residual import ResidualSize
from ...optim.weights import LocalClip


class Ran(NamedTuple):
    """A reduction's result, apply included, and when it began and ended, by time.perf_counter."""

    exchanged: Exchanged
    began: float
    ended: float


class RoundExchange:
    """One rank's side of a round's exchange: it selects from it, keeps a residual, and gets back.

    bucket:   of the sums; exchange: the way they are reduced.
    progress: how many reductions had an update.
    Raises ValueError for adam_correction, as what is reduced here is no single gradient of a
    rank's, and for shards.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], compression: Any) -> None:
        if isinstance(compression, ErrorFeedback) and compression.adam_correction:
            raise ValueError(
                "adam_correction is for a gradient that every rank has in every step: modes 'abs', "
                "'hogbatch' and 'adaptive-hogbatch' exchange sums and models; wrap Adam itself"
            )
        if isinstance(compression, Shards):
            raise ValueError(
                "Compression.shards is not for the modes of adapt but 'balanced', which do not "
                "save owner errors: use that, or Compression.gtopk"
            )
        self.bucket = Bucket(parameters)
        self._clip = LocalClip([], None)
        self.progress = Progress()
        self.exchange = open_exchange(self.bucket, compression, self.progress)
        self._ran: Ran | None = None

    @property
    def elements(self) -> int:
        """Return how many values are exchanged."""
        return self.bucket.length

    @property
    def signature(self) -> str:
        """Return what must be equal on all ranks."""
        return self.exchange.signature

    def state_dict(self) -> dict[str, Any]:
        """Return copies of what was not sent yet, [n] on the host, and how far the exchange is.

        residual, velocity: None where all is sent, and without momentum correction.
        """
        residual = self.exchange.residual
        residuals = {} if residual is None else residual.after_last_step()
        regions = self._regions
        return {
            **{
                name: residuals[name].to("cpu", copy=True) if name in residuals else None
                for name in ("residual", "velocity")
            },
            "steps": self.progress.steps,
            "regions": None if regions is None else regions.record(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Hold back what another exchange of as many elements did, and go on from its steps.

        All ranks do so before the next reduction. Raises ValueError for a residual where this
        compression keeps none.
        """
        residuals = (
            {} if self.exchange.residual is None else self.exchange.residual.after_last_step()
        )
        for name in ("residual", "velocity"):
            if state[name] is not None and name not in residuals:
                raise ValueError(
                    f"this compression keeps no {name}, and the state has one, which would be "
                    "lost; load it with the compression it was saved with"
                )
        for name, tensor in residuals.items():
            tensor.zero_() if state[name] is None else tensor.copy_(state[name])
        if (residual := self.exchange.residual) is not None:
            residual.holds_nothing = state["residual"] is None
            residual.astray = True
        self.progress.steps = state["steps"]
        if self._regions is not None and state["regions"] is not None:
            self._regions.resume(state["regions"])

    @property
    def _regions(self) -> Regions | None:
        exchange = self.exchange
        return exchange.regions if isinstance(exchange, SparseExchange) else None

    @property
    def unsent(self) -> list[torch.Tensor] | None:
        """Return the residual's own memory, by parameter; None where nothing is left in it."""
        residual = self.exchange.residual
        if residual is None or residual.holds_nothing:
            return None
        return self.bucket.split(view_tensor(residual.values))

    def forget(self) -> None:
        """Keep nothing of what was not sent: it is somebody else's now."""
        if self.exchange.residual is not None:
            self.exchange.residual.clear()

    def take(self, sums: Sequence[torch.Tensor | None], allowed_norm: float | None = None) -> bool:
        """Take a rank's sums, one for each parameter; return whether they are finite.

        allowed_norm: their part of the update is shortened to this rank's share of it.
        """
        self._clip = LocalClip(sums, allowed_norm)
        self.bucket.take(1.0, gradients=sums)
        return self.bucket.all_finite()

    def reduce(
        self, transport: Transport, weight: float, share: float = 1.0
    ) -> list[torch.Tensor] | None:
        """Return the update: the sum of weight * sums of all ranks; share: of this rank in it.

        None where it overflows: the residual is then as it was before.
        """
        bucket, residual = self.bucket, self.exchange.residual
        bucket.weight = weight * self._clip.factor(weight, share)
        began = time.perf_counter()
        with bucket.on_stream():
            if residual is not None:
                residual.remember()
            exchanged = self.exchange(bucket, transport)
            reduced = time.perf_counter()
            if exchanged.finite:
                with profiled("apply"):
                    self.exchange.apply(bucket)
            elif residual is not None:
                residual.restore()
        if residual is not None:
            residual.forget()
        ended = time.perf_counter()
        select_seconds = exchanged.select_seconds + ended - reduced
        self._ran = Ran(replace(exchanged, select_seconds=select_seconds), began, ended)
        if not exchanged.finite:
            return None
        self.progress.steps += 1
        return bucket.gradients

    def take_ran(self) -> Ran | None:
        """Return what the last reduction did, once; None where nothing was reduced since then."""
        ran, self._ran = self._ran, None
        return ran

    def residual_size(self) -> ResidualSize | None:
        """Return how large the residual is after the last reduction; reads all of it."""
        residual = self.exchange.residual
        return None if residual is None else residual.residual_size(self.exchange.sent_mass())

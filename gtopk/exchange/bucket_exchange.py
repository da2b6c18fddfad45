"""BucketExchange: a bucket, how it is exchanged, and what its gradients were when it was."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from collectives.ranges import profiled
from collectives.transports import Transport

from .. import settings
from ..compression import ErrorFeedback
from .adamw import AdamGroups, AdamSteps
from .buckets.buckets import Bucket
from .buckets.placeholders import are_lacking
from .exchange import (
    DenseExchange,
    Exchange,
    Exchanged,
    Progress,
    SendingAlong,
    SparseExchange,
    open_residual,
)
from .exchanges import open_exchange
from .residual import ResidualSize


class BucketExchange:
    """One of an optimizer's buckets, exchanged as one operation of this name.

    parameters, names: in the order in which they lie in the bucket.
    """

    def __init__(
        self,
        name: str,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        exchange: Exchange,
        bucket: Bucket,
    ) -> None:
        self.name = name
        self.parameters = list(parameters)
        self.names = list(names)
        self.bucket = bucket
        self.exchange = exchange
        self._taken: list[torch.Tensor | None] = []  # gradients, and their versions then
        self._versions: list[int] = []
        self._mark: torch.Tensor | None = None
        self._marks_whole = False
        # Of the parameters: without CuPy, the bucket of those on a GPU is on the host.
        self._on_gpu = any(parameter.is_cuda for parameter in self.parameters)

    @property
    def elements(self) -> int:
        """Return how many values its gradients have."""
        return self.bucket.length

    @property
    def signature(self) -> str:
        """Return what must be equal on all ranks in the next step, besides the plan."""
        return self.exchange.signature

    def record(self) -> dict[str, Any]:
        """Return what a checkpoint needs besides the residual of each parameter."""
        regions = self.exchange.regions if isinstance(self.exchange, SparseExchange) else None
        return {"names": self.names, "regions": regions.record() if regions is not None else None}

    def resume(self, record: Mapping[str, Any]) -> None:
        """Go on from a record of a bucket with the same names."""
        regions = self.exchange.regions if isinstance(self.exchange, SparseExchange) else None
        if regions is not None and record["regions"] is not None:
            regions.resume(record["regions"])

    @property
    def sparse(self) -> Sequence[torch.nn.Parameter]:
        """Return the parameters whose sparse gradients it takes."""
        return self.bucket.sparse

    def take_sparse(self, names: Collection[str]) -> None:
        """Take the gradients of these sparse, as far as they are here; all ranks call it alike."""
        named = zip(self.names, self.parameters, strict=True)
        self.bucket.sparse = [parameter for name, parameter in named if name in names]

    def send_along(self) -> None:
        """Have room for the residual of these parameters, and send it in the next step.

        Where the exchange has none of its own. All ranks call it alike: that step is dense.
        """
        if self.exchange.residual is None:
            self.exchange = SendingAlong(self.bucket, self.exchange)

    @property
    def has_room(self) -> bool:
        """Tell whether there is a residual here, or may be."""
        return self.exchange.residual is not None

    @property
    def looks_first(self) -> bool:
        """Tell whether gradients are looked at for NaN and infinity before they are exchanged.

        Not where the exchange finds them, and not on a GPU, which would have to be waited for.
        """
        return not (self._on_gpu or self.exchange.finds_nonfinite)

    def take(self, weight: float, scale: float) -> None:
        """Take the gradients as they are now."""
        self.bucket.take(weight, scale)
        self._read_options()

    def weigh(self, weight: float, share: float) -> None:
        """Multiply what was taken with another weight; share: of all samples, this rank's."""
        self.bucket.weight, self.bucket.share = weight, share

    def take_nothing(self, scale: float) -> None:
        """Take part without gradients: only this rank's residual is exchanged."""
        self.bucket.take_nothing(scale)
        self._read_options()

    def _read_options(self) -> None:
        """Read the rate and the other options of AdamW, where its steps are made here."""
        residual = self.exchange.residual
        share = None if residual is None else residual.read_options()
        if share is not None and self.bucket.share:
            self.bucket.share = share  # whatever shortens or scales the gradients is no part of it

    def watch(self) -> None:
        """Make sure that `is_as_taken` knows what was taken: before the program goes on."""
        self._taken = [p.grad for p in self.parameters]
        self._versions = _versions_of(self._taken)
        self._marks_whole = settings.CHECK_GRADIENTS.read()
        self._mark = self.bucket.mark(self._marks_whole)

    def is_as_taken(self) -> bool:
        """Tell whether nobody has changed a gradient since `watch`.

        Changes in place are counted by torch. Those by `.data`, by NumPy and by a GradScaler are
        not, and show in the gradients' values, on the host only, as far as `Bucket.mark` looks.
        """
        here = [p.grad for p in self.parameters]
        alike = all(map(operator.is_, here, self._taken)) and _versions_of(here) == self._versions
        residual = self.exchange.residual
        alike = alike and (residual is None or residual.options_are_as_read())
        look = alike and self._mark is not None
        mark = self.bucket.mark(self._marks_whole) if look else None
        return alike and (mark is None or self._mark is None or torch.equal(mark, self._mark))

    def missing(self) -> list[str]:
        """Return the names of the parameters that have no gradient here."""
        lacking = are_lacking([parameter.grad for parameter in self.parameters])
        return [*itertools.compress(self.names, lacking)]

    def all_finite(self) -> bool:
        """Tell whether the gradients hold neither NaN nor infinity; in any thread."""
        with self.bucket.on_stream():
            return self.bucket.all_finite()

    def not_finite(self) -> list[str]:
        """Return whose gradients hold NaN or infinity here, by names; in any thread."""
        with self.bucket.on_stream():
            return [
                name
                for name, gradient in zip(self.names, self.bucket.gradients, strict=True)
                if not bool(torch.isfinite(gradient).all())
            ]

    def remember(self) -> None:
        """Keep what `undo` is to bring back."""
        if self.exchange.residual is not None:
            with self.bucket.on_stream():
                self.exchange.residual.remember()

    def set_aside(self, missing_everywhere: Collection[str]) -> None:
        """Keep the residual of these parameters out of this step; call it after `remember`.

        An optimizer passes over a parameter without a gradient, and so it would not over one whose
        residual is the update.
        """
        residual = self.exchange.residual
        if residual is None or not missing_everywhere:
            return
        ends = itertools.accumulate(parameter.numel() for parameter in self.parameters)
        parts = {
            place: slice(end - parameter.numel(), end)
            for place, (name, parameter, end) in enumerate(
                zip(self.names, self.parameters, ends, strict=True)
            )
            if name in missing_everywhere
        }
        with self.bucket.on_stream():
            residual.set_aside(parts)

    def reduce(self, transport: Transport) -> Exchanged:
        """Sum over the ranks; the gradients stay as they are."""
        with self.bucket.on_stream():
            return self.exchange(self.bucket, transport)

    def undo(self) -> None:
        """Make it as if nothing had been exchanged, nor applied, since `remember`."""
        if self.exchange.residual is not None:
            with self.bucket.on_stream():
                self.exchange.residual.restore()
        if isinstance(self.exchange, SendingAlong):
            self.exchange.was_last = False

    def apply(self, missing_everywhere: Collection[str]) -> None:
        """Replace the gradients by the sum; see `Bucket.keep` for those that are missing.

        Until `commit`, `undo` takes it back, all but the gradients.
        """
        self._apply()
        missing: Collection[int] = ()
        if missing_everywhere:
            missing = {place for place, n in enumerate(self.names) if n in missing_everywhere}
        self.bucket.keep(missing)
        self._let_go_of_taken()

    def _apply(self) -> None:
        with profiled("apply"), self.bucket.on_stream():
            self.exchange.apply(self.bucket)
            if self.exchange.residual is not None:
                self.exchange.residual.bring_back()

    def commit(self) -> None:
        """Have nothing to undo any more."""
        if self.exchange.residual is not None:
            self.exchange.residual.forget()
        if isinstance(self.exchange, SendingAlong) and self.exchange.was_last:
            self.exchange = self.exchange.then

    def residual_size(self) -> ResidualSize | None:
        """Return how large the residual is after the last step; reads all of it."""
        residual = self.exchange.residual
        if residual is None:
            return None
        with self.bucket.on_stream():
            return residual.residual_size(self.exchange.sent_mass())

    def apply_to_nothing(self) -> None:
        """Hold back what was not sent; the parameters stay without an update."""
        self._apply()
        self.let_go()

    def poison(self) -> None:
        """Make every gradient NaN: the step is skipped."""
        self.bucket.poison()
        self._let_go_of_taken()
        self.commit()

    def let_go(self) -> None:
        """Leave the gradients as they are, and hold on to none of them."""
        self.bucket.let_go()
        self._let_go_of_taken()
        self.commit()

    def _let_go_of_taken(self) -> None:
        self._taken, self._versions = [], []
        self._mark = None


def _versions_of(gradients: Sequence[torch.Tensor | None]) -> list[int]:
    """Return how often torch knows each to have been changed in place."""
    return [-1 if gradient is None else gradient._version for gradient in gradients]


def open_bucket_exchange(
    name: str,
    parameters: Sequence[torch.nn.Parameter],
    names: Sequence[str],
    compression: object,
    progress: Progress,
    share: float = 1.0,
    room_share: float = 1.0,
    sizes: Sequence[int] | None = None,
) -> BucketExchange:
    """Return the bucket of these parameters, with nothing in its residual.

    share: of the elements of a step that are compressed so.
    room_share: of the time from when its gradients are there until backward ends, to hide in.
    sizes: of the parameters that the one given stands for, side by side; None: it is itself.
    """
    bucket = Bucket(parameters, sizes)
    exchange = open_exchange(bucket, compression, progress, share, room_share)
    return BucketExchange(name, parameters, names, exchange, bucket)


def make_adam_steps(
    bucket_exchange: BucketExchange,
    compression: ErrorFeedback,
    groups: AdamGroups,
    ranks: int,
    *,
    whole: bool = False,
    parameters: Sequence[torch.Tensor] | None = None,
) -> None:
    """Have a new bucket make Adam's steps of its gradients before it exchanges them.

    ranks: that exchange it. whole: every entry is sent.
    parameters: that lie in it, where one other stands for them.
    """
    bucket = bucket_exchange.bucket
    if whole or ranks == 1:  # one alone has nobody to send less to: it steps as its optimizer would
        bucket_exchange.exchange = DenseExchange(open_residual(bucket, compression))
    assert bucket_exchange.exchange.residual is not None
    bucket_exchange.exchange.residual.make_steps(AdamSteps(bucket, groups, ranks, parameters))

"""BucketExchange: a bucket, its gradients, and the exchange that its compression calls for."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from collectives.telemetry import profiled
from collectives.transports import Transport

from .. import settings
from ..compression import (
    Automatic,
    ErrorFeedback,
    Hierarchical,
    NoneCompressor,
    Shards,
    SparseCompression,
)
from .adamw import AdamGroups, AdamSteps
from .automatic import AutomaticExchange
from .buckets.buckets import Bucket
from .exchange import (
    CompressorExchange,
    DenseExchange,
    Exchange,
    Exchanged,
    Progress,
    SparseExchange,
    open_residual,
)
from .owned_exchanges import NodeExchange, ShardExchange
from .residual import Residual, ResidualSize


def require_compression(compression: object) -> None:
    """Raise TypeError unless this is a `Compression` method or a Compressor class."""
    is_class = isinstance(compression, type) and hasattr(compression, "compress")
    if is_class or isinstance(compression, ErrorFeedback):
        return
    if isinstance(compression, type) and issubclass(compression, ErrorFeedback):
        name = compression.__name__.lower().replace("automatic", "auto")
        raise TypeError(f"compression is the class of Compression.{name}(...): call it")
    raise TypeError(
        "compression must be Compression.none, .fp16, .bf16, Compression.topk(density=...), "
        "Compression.gtopk(density=...), .oktopk(density=...), .hierarchical(density=...), "
        f".shards(), .auto() or a Compressor class, got {compression!r}"
    )


class BucketExchange:
    """One of an optimizer's buckets, exchanged as one named operation.

    In a step: `capture_gradients`, `snapshot`, `reduce`, then `apply` and `commit`, or `undo`.

    parameters, names: in bucket order. elements: the number of values in the bucket.
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
        self.bucket, self.elements = bucket, bucket.length
        self._shapes = [parameter.shape for parameter in self.parameters]
        self.exchange = exchange
        self.adam: AdamSteps | None = None  # turns the gradients into steps before the exchange
        self._captured: list[torch.Tensor | None] = []  # gradients at `watch`, and their versions
        self._versions: list[int] = []
        self._checksum: torch.Tensor | None = None
        self._checksums_whole = settings.CHECK_GRADIENTS.read()
        # Ask the parameters, not the bucket: without CuPy, a GPU's bucket is on the host.
        self._on_gpu = any(parameter.is_cuda for parameter in self.parameters)

    @property
    def signature(self) -> str:
        """Return the options that all ranks must share in the next step, besides the layout."""
        return self.exchange.signature

    def record(self) -> dict[str, Any]:
        """Return the bucket's record for a checkpoint: names and regions, without the residual."""
        # The residual is saved by parameter instead: a resumed run may have other buckets.
        regions = self.exchange.regions if isinstance(self.exchange, SparseExchange) else None
        return {"names": self.names, "regions": regions.record() if regions is not None else None}

    def resume(self, record: Mapping[str, Any]) -> None:
        """Continue from the record of a bucket with the same names."""
        regions = self.exchange.regions if isinstance(self.exchange, SparseExchange) else None
        if regions is not None and record["regions"] is not None:
            regions.resume(record["regions"])

    @property
    def sparse(self) -> Sequence[torch.nn.Parameter]:
        """Return the parameters in this bucket that may have sparse gradients."""
        return self.bucket.sparse

    def accept_sparse(self, names: Collection[str]) -> None:
        """Accept sparse gradients of these parameters, if in this bucket; alike on all ranks."""
        named = zip(self.names, self.parameters, strict=True)
        self.bucket.sparse = [parameter for name, parameter in named if name in names]

    def start_draining(self) -> None:
        """If the exchange has no residual, add one, which dense steps then drain.

        All ranks must call it, as their next step is dense.
        """
        if self.exchange.residual is None:
            self.exchange = DrainingExchange(self.bucket, self.exchange)

    @property
    def residual(self) -> Residual | None:
        """Return the exchange's residual, or None if it has none."""
        return self.exchange.residual

    @property
    def has_residual(self) -> bool:
        """Return whether the exchange has a residual."""
        return self.exchange.residual is not None

    @property
    def checks_finite_first(self) -> bool:
        """Return whether gradients are checked for NaN and infinity before the exchange.

        No if the exchange finds them itself, nor on a GPU, where the host would have to wait.
        """
        return not (self._on_gpu or self.exchange.finds_nonfinite)

    def capture_gradients(
        self,
        weight: float,
        scale: float,
        gradients: Sequence[torch.Tensor | None] | None = None,
    ) -> None:
        """Call `Bucket.capture_gradients` and read the options; raise as `require_shapes` does."""
        self.require_shapes()
        self.bucket.capture_gradients(weight, scale, gradients)
        self._read_options()

    def set_weight(self, weight: float, share: float) -> None:
        """Change the weight of the captured gradients.

        share: this rank's share of all ranks' samples.
        """
        self.bucket.weight, self.bucket.share = weight, share

    def capture_zeros(self, scale: float) -> None:
        """Take part without gradients: only this rank's residual is exchanged."""
        self.require_shapes()
        self.bucket.capture_zeros(scale)
        self._read_options()

    def require_shapes(self) -> None:
        """Raise ValueError if a parameter's shape has changed since the bucket was created.

        Its part of the vector and the residual is fixed; torch would resize both with a warning.
        """
        if [parameter.shape for parameter in self.parameters] == self._shapes:
            return
        pairs = zip(self.parameters, self._shapes, strict=True)
        place = next(n for n, (parameter, shape) in enumerate(pairs) if parameter.shape != shape)
        name = f"'{self.names[place]}'" if self.names else f"number {place}"
        raise ValueError(
            f"parameter {name} has the shape {list(self.parameters[place].shape)}, but had "
            f"{list(self._shapes[place])} in its last exchange: after layers change their shape, "
            "create a plain optimizer of the new parameters, and wrap that"
        )

    def _read_options(self) -> None:
        """Read AdamW's learning rate and other options, if the steps are computed here."""
        if self.adam is None:
            return
        assert self.exchange.residual is not None
        self.exchange.residual.read_options()
        if self.bucket.share:
            self.bucket.share = self.adam.share  # not affected by clipping and scaling

    def watch(self) -> None:
        """Record the captured gradients for `is_unchanged`, before the program goes on."""
        self._captured = [p.grad for p in self.parameters]
        self._versions = _versions_of(self._captured)
        self._checksum = self.bucket.checksum(self._checksums_whole)

    def is_unchanged(self) -> bool:
        """Return whether no gradient has changed since `watch`.

        torch counts in-place changes, but not those made through `.data`, NumPy or a GradScaler.
        Those only show in the values, on the host only, if `Bucket.checksum` reads them.
        """
        gradients = [p.grad for p in self.parameters]
        if not all(map(operator.is_, gradients, self._captured)):
            return False
        options_changed = self.adam is not None and not self.adam.is_unchanged()
        if options_changed or _versions_of(gradients) != self._versions:
            return False
        if self._checksum is None:
            return True
        # Compare checksums last, and only if that decides, because it reads values.
        checksum = self.bucket.checksum(self._checksums_whole)
        return checksum is None or torch.equal(checksum, self._checksum)

    def missing(self) -> list[str]:
        """Return the names of the parameters that have no gradient on this rank."""
        parameters = zip(self.names, self.parameters, strict=True)
        return [name for name, parameter in parameters if parameter.grad is None]

    def all_finite(self) -> bool:
        """Return whether the gradients contain neither NaN nor infinity; from any thread."""
        with self.bucket.on_stream():
            return self.bucket.all_finite()

    def not_finite(self) -> list[str]:
        """Return the names of parameters with NaN or infinity in the gradient; from any thread."""
        with self.bucket.on_stream():
            return [
                name
                for name, gradient in zip(self.names, self.bucket.gradients, strict=True)
                if not bool(torch.isfinite(gradient).all())
            ]

    def snapshot(self) -> None:
        """Save the current residual for `undo`."""
        if self.exchange.residual is not None:
            with self.bucket.on_stream():
                self.exchange.residual.snapshot()

    def decay(self, factor: float) -> None:
        """Multiply the residual by a factor; call it after `snapshot`."""
        residual = self.exchange.residual
        # Skip a factor of 1: after a snapshot, multiplying also copies.
        if residual is not None and not residual.is_empty and factor != 1.0:
            with self.bucket.on_stream():
                residual.decay(factor)

    def exclude(self, missing_everywhere: Collection[str]) -> None:
        """Exclude these parameters' residuals from this step; call it after `snapshot`.

        missing_everywhere: names of parameters without a gradient on any rank. The optimizer must
            skip them, but would not if their residual became the update.
        """
        residual = self.exchange.residual
        if residual is None or not missing_everywhere:
            return
        places = [place for place, name in enumerate(self.names) if name in missing_everywhere]
        with self.bucket.on_stream():
            residual.stash(places)

    def reduce(self, transport: Transport) -> Exchanged:
        """Sum the gradients over the ranks; a collective. `apply` is the first to change them."""
        with self.bucket.on_stream():
            return self.exchange(self.bucket, transport)

    def undo(self) -> None:
        """Restore the residual to its state at `snapshot`."""
        if self.exchange.residual is not None:
            with self.bucket.on_stream():
                self.exchange.residual.restore()
        if isinstance(self.exchange, DrainingExchange):
            # Otherwise `commit` would switch exchanges, though the last draining step is void.
            self.exchange.is_drained = False

    def apply(self, missing_everywhere: Collection[str]) -> None:
        """Replace the gradients with the sum; `Bucket.keep_gradients` handles missing ones.

        Until `commit`, `undo` can restore the residual, but not the gradients.
        """
        self.apply_sum()
        missing: Collection[int] = ()
        if missing_everywhere:
            missing = {place for place, n in enumerate(self.names) if n in missing_everywhere}
        self.bucket.keep_gradients(missing)
        self._release_captured()

    def apply_sum(self) -> None:
        """Replace the gradients with the sum, without the rest of `apply`."""
        with profiled("apply"), self.bucket.on_stream():
            self.exchange.apply(self.bucket)
            if self.exchange.residual is not None:
                # After `apply`, which may empty the residual: the stashed part was not sent.
                self.exchange.residual.unstash()

    def apply_at_once(self, exchanged: Exchanged) -> Exchanged:
        """Call `apply_sum`; add its time to the selection's, which reads the same entries."""
        begun = time.perf_counter()
        self.apply_sum()
        seconds = exchanged.select_seconds + time.perf_counter() - begun
        return replace(exchanged, select_seconds=seconds)

    def commit(self) -> None:
        """Make the step final: it can no longer be undone."""
        if self.exchange.residual is not None:
            self.exchange.residual.drop_snapshot()
        if isinstance(self.exchange, DrainingExchange) and self.exchange.is_drained:
            self.exchange = self.exchange.next_exchange

    def residual_size(self) -> ResidualSize | None:
        """Return the size of the residual after the last step; reads all of it."""
        residual = self.exchange.residual
        if residual is None:
            return None
        with self.bucket.on_stream():
            return residual.residual_size()

    def finish_joined_step(self) -> None:
        """End a step of a joined rank: the residual changes, the parameters do not."""
        # Commit at once: no optimizer step follows here that would do it.
        self.apply_sum()
        self.commit()
        self.release_gradients()

    def poison(self) -> None:
        """Make every gradient NaN: the step is skipped and has been undone."""
        self.bucket.poison()
        self._release_captured()

    def release_gradients(self) -> None:
        """Drop all references to gradients, once the step has been committed or undone."""
        self.bucket.release_gradients()
        self._release_captured()

    def _release_captured(self) -> None:
        self._captured, self._versions = [], []
        self._checksum = None


def _versions_of(gradients: Sequence[torch.Tensor | None]) -> list[int]:
    """Return torch's count of each gradient's changes in place; -1 for None."""
    return [-1 if gradient is None else gradient._version for gradient in gradients]


def open_bucket_exchange(
    name: str,
    parameters: Sequence[torch.nn.Parameter],
    names: Sequence[str],
    compression: Any,
    progress: Progress,
    budget_share: float = 1.0,
    room_share: float = 1.0,
    members: Sequence[torch.Tensor] | None = None,
) -> BucketExchange:
    """Create the BucketExchange of these parameters, with an empty residual.

    compression: as the user passed it, after `require_compression`.
    budget_share: this bucket's share of the compressed elements of a step.
    room_share: this bucket's share of the time from when its gradients are ready until backward
        ends.
    members: the tensors that the single given parameter stands for; None: it stands for itself.
    """
    bucket = Bucket(parameters, members)
    exchange: Exchange
    # Test for these two first: both are kinds of SparseCompression.
    if isinstance(compression, Hierarchical) and compression.inside == "dense":
        exchange = NodeExchange(bucket, compression, progress)
    elif isinstance(compression, Shards):
        exchange = ShardExchange(bucket, compression, progress)
    elif isinstance(compression, SparseCompression):
        exchange = SparseExchange(bucket, compression, progress)
    elif isinstance(compression, Automatic):
        exchange = AutomaticExchange(bucket, compression, progress, budget_share, room_share)
    elif compression is NoneCompressor:
        exchange = DenseExchange()
    else:
        exchange = CompressorExchange(compression)
    return BucketExchange(name, parameters, names, exchange, bucket)


def attach_adam(
    bucket_exchange: BucketExchange,
    compression: ErrorFeedback,
    groups: AdamGroups,
    ranks: int,
    *,
    whole: bool = False,
) -> None:
    """Make a new bucket turn its gradients into Adam steps before it exchanges them.

    ranks: how many ranks exchange it. whole: send every entry.
    """
    bucket = bucket_exchange.bucket
    if whole or ranks == 1:  # a single rank sends nothing: it steps as its optimizer would
        bucket_exchange.exchange = DenseExchange(open_residual(bucket, compression))
    assert bucket_exchange.exchange.residual is not None
    bucket_exchange.adam = AdamSteps(bucket, groups, ranks)
    bucket_exchange.exchange.residual.hold_adam_moments(bucket_exchange.adam)


def mean_square_ratio(bucket_exchanges: Sequence[Any]) -> float:
    """Return the mean gradient's sum of squares over this rank's, from the last samples.

    At most 1; 1 if nothing was sampled.
    """
    row_sums = [
        residual.row_sums()
        for each in bucket_exchanges
        if (residual := each.residual) is not None and residual.shares_second_moment
    ]
    mean, own = (sum(sums) for sums in zip(*row_sums, strict=True)) if row_sums else (1.0, 1.0)
    # On average over the ranks the mean gradient is shorter, but a sample may disagree.
    return min(1.0, mean / own) if mean > 0 and own > 0 else 1.0


def gradient_norm(bucket_exchanges: Iterable[Any], clip_factor: float) -> float | None:
    """Return the norm of the mean gradient in the last step, estimated from that step's sample.

    clip_factor: the factor that clipped this rank's gradients before; about the same on all ranks.

    None if Adam's steps are not computed here, as no rank knows the norm then, or if the step
    sampled nothing but zeros, as it may of a few hundred parameters.
    """
    squares = sum(each.adam.mean_square for each in bucket_exchanges if each.adam is not None)
    return math.sqrt(squares) / clip_factor if squares else None


class DrainingExchange:
    """Drain a loaded residual with dense steps, before an exchange without a residual takes over.

    All ranks start together, including those without a residual. In the last draining step, as in
    every step after it, the part of a sum that 16 bits cannot hold is lost.

    next_exchange: the exchange that follows.
    is_drained: whether the last applied step sent the rest on all ranks. `next_exchange` takes
        over when that step can no longer be undone.
    """

    def __init__(self, bucket: Bucket, next_exchange: Exchange) -> None:
        self.next_exchange = next_exchange
        # No momentum in the exchange that follows, so a saved velocity is not needed.
        self.residual = Residual(
            bucket.length, bucket.dtype, device=bucket.device, sizes=bucket.sizes
        )
        self.is_drained = False
        self._dense = DenseExchange(self.residual)
        self.signature, self.finds_nonfinite = self._dense.signature, self._dense.finds_nonfinite
        self._is_drained_now = False  # whether the current step sends the rest

    def __call__(self, bucket: Bucket, transport: Transport) -> Exchanged:
        exchanged = self._dense(bucket, transport)
        # Fractions differ between ranks: one rank with a rest keeps all ranks draining.
        has_rest = np.array([not self._dense.sends_all()], np.float32)
        transport.allreduce(has_rest, "max")
        self._is_drained_now = not has_rest[0]
        return exchanged

    def apply(self, bucket: Bucket) -> None:
        """Replace the gradients with the sum."""
        self._dense.apply(bucket)
        self.is_drained = self._is_drained_now

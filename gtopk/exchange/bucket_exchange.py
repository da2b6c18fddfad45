"""BucketExchange: a bucket with the exchange that its compression asks for, and its gradients."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from collectives.ranges import profiled
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
from .buckets.parameters import lack_gradients
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
    """Raise TypeError for a value that is neither a `Compression` method nor a Compressor class."""
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
    """One of an optimizer's buckets, exchanged as one operation of this name.

    In a step: `capture_gradients`, `snapshot`, `reduce`, then `apply` and `commit`, or `undo`.

    parameters, names: in their order in the bucket. elements: the number of its values.
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
        self.adam: AdamSteps | None = None  # made of its gradients, before they are exchanged
        self._captured: list[torch.Tensor | None] = []  # gradients at `watch`, and their versions
        self._versions: list[int] = []
        self._checksum: torch.Tensor | None = None
        self._checksums_whole = settings.CHECK_GRADIENTS.read()
        # The parameters, not the bucket: without CuPy, a bucket of those on a GPU is on the host.
        self._on_gpu = any(parameter.is_cuda for parameter in self.parameters)

    @property
    def signature(self) -> str:
        """Return the options that must be equal on all ranks in the next step, besides the plan."""
        return self.exchange.signature

    def record(self) -> dict[str, Any]:
        """Return the bucket's record for a checkpoint: names and regions, without the residual."""
        # The residual is kept by parameter instead: a resumed run may have other buckets.
        regions = self.exchange.regions if isinstance(self.exchange, SparseExchange) else None
        return {"names": self.names, "regions": regions.record() if regions is not None else None}

    def resume(self, record: Mapping[str, Any]) -> None:
        """Go on from a record of a bucket with the same names."""
        regions = self.exchange.regions if isinstance(self.exchange, SparseExchange) else None
        if regions is not None and record["regions"] is not None:
            regions.resume(record["regions"])

    @property
    def sparse(self) -> Sequence[torch.nn.Parameter]:
        """Return the parameters whose sparse gradients this bucket takes."""
        return self.bucket.sparse

    def accept_sparse(self, names: Collection[str]) -> None:
        """Accept these parameters' sparse gradients, if they are here; all ranks call it alike."""
        named = zip(self.names, self.parameters, strict=True)
        self.bucket.sparse = [parameter for name, parameter in named if name in names]

    def start_draining(self) -> None:
        """Make room for a residual, which dense steps then send, if the exchange has none.

        All ranks call it alike: their next step is dense.
        """
        if self.exchange.residual is None:
            self.exchange = DrainingExchange(self.bucket, self.exchange)

    @property
    def residual(self) -> Residual | None:
        """Return the exchange's residual; None: it has no room for one."""
        return self.exchange.residual

    @property
    def has_residual(self) -> bool:
        """Tell whether there is room for a residual."""
        return self.exchange.residual is not None

    @property
    def checks_finite_first(self) -> bool:
        """Tell whether gradients are checked for NaN and infinity before they are exchanged.

        Not where the exchange finds them, and not on a GPU, where the host would have to wait.
        """
        return not (self._on_gpu or self.exchange.finds_nonfinite)

    def capture_gradients(
        self,
        weight: float,
        scale: float,
        gradients: Sequence[torch.Tensor | None] | None = None,
    ) -> None:
        """Do as `Bucket.capture_gradients`; raises as `require_shapes` does."""
        self.require_shapes()
        self.bucket.capture_gradients(weight, scale, gradients)
        self._read_options()

    def set_weight(self, weight: float, share: float) -> None:
        """Set another weight for the gradients that were captured.

        share: this rank's, of all ranks' samples.
        """
        self.bucket.weight, self.bucket.share = weight, share

    def capture_zeros(self, scale: float) -> None:
        """Take part without gradients: only this rank's residual is exchanged."""
        self.require_shapes()
        self.bucket.capture_zeros(scale)
        self._read_options()

    def require_shapes(self) -> None:
        """Raise ValueError where a parameter has another shape than when the bucket was made.

        A part of a vector, and of the residual, is its: torch would resize these with a warning.
        """
        if [parameter.shape for parameter in self.parameters] == self._shapes:
            return
        pairs = zip(self.parameters, self._shapes, strict=True)
        place = next(n for n, (parameter, shape) in enumerate(pairs) if parameter.shape != shape)
        name = f"'{self.names[place]}'" if self.names else f"number {place}"
        raise ValueError(
            f"parameter {name} has the shape {list(self.parameters[place].shape)}, and had "
            f"{list(self._shapes[place])} when it was exchanged before: where layers change their "
            "shape, make a plain optimizer of the new parameters, and wrap that"
        )

    def _read_options(self) -> None:
        """Read the rate and other options of AdamW, where its steps are made here."""
        if self.adam is None:
            return
        assert self.exchange.residual is not None
        self.exchange.residual.read_options()
        if self.bucket.share:
            self.bucket.share = self.adam.share  # clipping and scaling do not change it

    def watch(self) -> None:
        """Note the gradients that were captured, for `is_unchanged`; before the program goes on."""
        self._captured = [p.grad for p in self.parameters]
        self._versions = _versions_of(self._captured)
        self._checksum = self.bucket.checksum(self._checksums_whole)

    def is_unchanged(self) -> bool:
        """Tell whether no gradient has changed since `watch`.

        torch counts changes in place, but not those by `.data`, by NumPy and by a GradScaler: these
        show in the gradients' values, on the host only, as far as `Bucket.checksum` reads them.
        """
        here = [p.grad for p in self.parameters]
        if not all(map(operator.is_, here, self._captured)):
            return False
        options_changed = self.adam is not None and not self.adam.is_unchanged()
        if options_changed or _versions_of(here) != self._versions:
            return False
        if self._checksum is None:
            return True
        # The mark last, and only where it decides: it reads values.
        mark = self.bucket.checksum(self._checksums_whole)
        return mark is None or torch.equal(mark, self._checksum)

    def missing(self) -> list[str]:
        """Return the names of the parameters that have no gradient here."""
        lacking = lack_gradients([parameter.grad for parameter in self.parameters])
        return [*itertools.compress(self.names, lacking)]

    def all_finite(self) -> bool:
        """Tell whether the gradients hold neither NaN nor infinity; in any thread."""
        with self.bucket.on_stream():
            return self.bucket.all_finite()

    def not_finite(self) -> list[str]:
        """Return the names of parameters whose gradients hold NaN or infinity; in any thread."""
        with self.bucket.on_stream():
            return [
                name
                for name, gradient in zip(self.names, self.bucket.gradients, strict=True)
                if not bool(torch.isfinite(gradient).all())
            ]

    def snapshot(self) -> None:
        """Keep the residual as it is now, for `undo`."""
        if self.exchange.residual is not None:
            with self.bucket.on_stream():
                self.exchange.residual.snapshot()

    def decay(self, factor: float) -> None:
        """Multiply the residual by a factor; call it after `snapshot`."""
        residual = self.exchange.residual
        # After a snapshot to multiply is to copy, too: not for a factor of 1.
        if residual is not None and not residual.is_empty and factor != 1.0:
            with self.bucket.on_stream():
                residual.decay(factor)

    def exclude(self, missing_everywhere: Collection[str]) -> None:
        """Keep the residual of these parameters out of this step; call it after `snapshot`.

        missing_everywhere: names of parameters without a gradient on any rank. Their optimizer is
            to pass over them, and would not if their residual was the update.
        """
        residual = self.exchange.residual
        if residual is None or not missing_everywhere:
            return
        places = [place for place, name in enumerate(self.names) if name in missing_everywhere]
        with self.bucket.on_stream():
            residual.stash(places)

    def reduce(self, transport: Transport) -> Exchanged:
        """Sum the gradients over the ranks; a collective. They stay as they are until `apply`."""
        with self.bucket.on_stream():
            return self.exchange(self.bucket, transport)

    def undo(self) -> None:
        """Bring the residual back to what it was at `snapshot`."""
        if self.exchange.residual is not None:
            with self.bucket.on_stream():
                self.exchange.residual.restore()
        if isinstance(self.exchange, DrainingExchange):
            # Else `commit` would change over though the step that sent the rest does not count.
            self.exchange.is_drained = False

    def apply(self, missing_everywhere: Collection[str]) -> None:
        """Replace the gradients by the sum; see `Bucket.keep_gradients` for those that are missing.

        Until `commit`, `undo` can bring the residual back, but not the gradients.
        """
        self.apply_sum()
        missing: Collection[int] = ()
        if missing_everywhere:
            missing = {place for place, n in enumerate(self.names) if n in missing_everywhere}
        self.bucket.keep_gradients(missing)
        self._release_captured()

    def apply_sum(self) -> None:
        """Put the sum in the gradients' place, without the rest of `apply`."""
        with profiled("apply"), self.bucket.on_stream():
            self.exchange.apply(self.bucket)
            if self.exchange.residual is not None:
                # After `apply`, which may empty the residual: what was set aside was not sent.
                self.exchange.residual.unstash()

    def commit(self) -> None:
        """Make the step final: it cannot be undone any more."""
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
        """End a step of a rank that has joined: the residual changes, parameters do not."""
        # Final at once: no optimizer will step here, which would make it so.
        self.apply_sum()
        self.commit()
        self.release_gradients()

    def poison(self) -> None:
        """Make every gradient NaN: the step is skipped, and was undone."""
        self.bucket.poison()
        self._release_captured()

    def release_gradients(self) -> None:
        """Drop all references to gradients, once the step was committed or undone."""
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
    """Return the bucket of these parameters, with nothing in its residual.

    compression: as the user passed it, and checked.
    budget_share: this bucket's, of the elements of a step that are compressed.
    room_share: this bucket's, of the time from when its gradients are ready until backward ends.
    members: the tensors that the one parameter given stands for; None: it stands for itself.
    """
    bucket = Bucket(parameters, members)
    exchange: Exchange
    # These two first: both are kinds of SparseCompression.
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
    """Make a new bucket turn its gradients into Adam's steps before it exchanges them.

    ranks: how many exchange it. whole: every entry is sent.
    """
    bucket = bucket_exchange.bucket
    if whole or ranks == 1:  # a single rank sends nothing: it steps as its optimizer would
        bucket_exchange.exchange = DenseExchange(open_residual(bucket, compression))
    assert bucket_exchange.exchange.residual is not None
    bucket_exchange.adam = AdamSteps(bucket, groups, ranks)
    bucket_exchange.exchange.residual.hold_adam_moments(bucket_exchange.adam)


def mean_square_ratio(bucket_exchanges: Sequence[Any]) -> float:
    """Return the sum of squares of the mean gradient over that of this rank's, from last samples.

    At most 1; 1 where nothing was sampled.
    """
    found = [
        residual.row_sums()
        for each in bucket_exchanges
        if (residual := each.residual) is not None and residual.shares_second_moment
    ]
    mean, own = (sum(sums) for sums in zip(*found, strict=True)) if found else (1.0, 1.0)
    # On average over ranks the mean gradient is the shorter one; a sample may say otherwise.
    return min(1.0, mean / own) if mean > 0 and own > 0 else 1.0


def gradient_norm(bucket_exchanges: Iterable[Any], clip_factor: float) -> float | None:
    """Return the mean gradient's norm in the last step, from that step's sample.

    clip_factor: by which this rank's gradients were shortened before, and about so the others'.

    None where no Adam's steps are made of it: no rank knows it then.
    """
    squares = [each.adam.mean_square for each in bucket_exchanges if each.adam is not None]
    return math.sqrt(sum(squares)) / clip_factor if squares else None


class DrainingExchange:
    """Sends a loaded residual along, in dense steps, before an exchange without one takes over.

    All ranks begin so together, also those without a residual. In the last such step, as in each
    step after it, the part of a sum that 16 bits cannot hold is lost.

    next_exchange: the exchange that follows.
    is_drained: whether the step applied last has sent the rest, on all ranks. `next_exchange`
        takes this one's place once that step cannot be undone any more.
    """

    def __init__(self, bucket: Bucket, next_exchange: Exchange) -> None:
        self.next_exchange = next_exchange
        # The exchange that follows takes no momentum: a velocity that was saved has no place here.
        self.residual = Residual(
            bucket.length, bucket.dtype, device=bucket.device, sizes=bucket.sizes
        )
        self.is_drained = False
        self._dense = DenseExchange(self.residual)
        self.signature, self.finds_nonfinite = self._dense.signature, self._dense.finds_nonfinite
        self._is_drained_now = False  # whether the current step sends the rest

    def __call__(self, bucket: Bucket, transport: Transport) -> Exchanged:
        exchanged = self._dense(bucket, transport)
        # Fractions differ from rank to rank: one that has something left keeps all draining.
        left = np.array([not self._dense.sends_all()], np.float32)
        transport.allreduce(left, "max")
        self._is_drained_now = not left[0]
        return exchanged

    def apply(self, bucket: Bucket) -> None:
        """Put the sum in place."""
        self._dense.apply(bucket)
        self.is_drained = self._is_drained_now

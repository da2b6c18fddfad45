"""Exchanges: each turns a bucket's gradients into the agreed update.

Accumulate, select, exchange, apply. An exchange runs on the engine's thread, on the gradients'
device and stream, once all ranks have agreed on the operation. `apply` is the first to change the
gradients, and runs only when every bucket of the step counts; until then `Residual.restore` can
undo the exchange.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Protocol

import torch

from collectives.algorithms import ALGORITHMS, Regions, find_nodes, reduce_where_supported
from collectives.cost_model import predict
from collectives.errors import NonFiniteError
from collectives.telemetry import profiled
from collectives.transports import Transport
from collectives.vector import SparseVector, is_on_device
from collectives.wire import NOTHING_CODED, CodingTotals, Format, coded

from ..compression import (
    BF16Compressor,
    Compressor,
    ErrorFeedback,
    FP16Compressor,
    Hierarchical,
    SparseCompression,
    selected,
)
from .buckets.arrays import Timestamp, from_array, is_host_array, to_array, view_dense
from .buckets.buckets import Bucket, GradientSum, only_torch_reaches
from .calibration import calibration_of
from .residual import Residual


@dataclass
class Progress:
    """An optimizer's steps and backward times, which its exchanges read.

    steps:            the number of steps with an update; the same on all ranks.
    backward_seconds: duration of a step's last backward pass, from the first gradient to the last.
    backward_began:   when its first gradient was complete, by time.perf_counter.
    """

    steps: int = 0
    backward_seconds: float = 0.0
    backward_began: float = 0.0


@dataclass(frozen=True)
class Exchanged:
    """The result of one exchange of a bucket: sizes, seconds, and whether the update is finite.

    select_seconds: to accumulate and select; communicate_seconds: from encode to decode.
    finite: whether the update is finite, also in the gradients' dtype; the same on every rank.
            A sum can overflow though no gradient did.
    ready_at: when the gradients were computed, by time.perf_counter; None on the host, where they
            are complete when captured.
    coded: seconds to encode and decode this rank's messages, and their length.
    predicted_seconds: predicted time to select and communicate; None without a prediction.
    """

    algorithm: str
    selected: int
    updated: int
    select_seconds: float
    communicate_seconds: float
    merge_seconds: float
    finite: bool
    bytes_counted: bool
    ready_at: float | None = None
    coded: CodingTotals = NOTHING_CODED
    predicted_seconds: float | None = None

    @property
    def seconds(self) -> float:
        """Return the seconds that a prediction is compared with."""
        return self.select_seconds + self.communicate_seconds


class Exchange(Protocol):
    """One method of turning the ranks' gradients into one update: call it, then `apply`."""

    @property
    def residual(self) -> Residual | None:
        """Return the residual, or None if this method has none."""

    @property
    def signature(self) -> str:
        """Return a description of the options that must be equal on all ranks."""

    @property
    def finds_nonfinite(self) -> bool:
        """Return True if `Exchanged.finite` is False whenever any rank's gradient is not finite."""

    def __call__(self, bucket: Bucket, transport: Transport) -> Exchanged:
        """Sum weight * gradient over the ranks, and keep the sum for `apply`."""

    def apply(self, bucket: Bucket) -> None:
        """Replace the gradients with the kept sum, which must be finite."""


class SparseExchange:
    """Top-k with error feedback: entries that are not sent stay in the residual.

    Works on the device of the gradients; the transport decides where the k entries are reduced.

    format: of the messages; None until the first exchange, if the cost model is to choose it.
    """

    def __init__(
        self,
        bucket: Bucket,
        compression: SparseCompression,
        progress: Progress,
        residual: Residual | None = None,
    ) -> None:
        self.compression = compression
        self._signature = compression.signature()  # formatted once, not in each step
        self.residual: Residual = residual or open_residual(bucket, compression)
        self._progress = progress
        # Picked, update, returned, and this rank's part of the rest that gradients cannot hold.
        self._result: (
            tuple[SparseVector, SparseVector, SparseVector, SparseVector | None] | None
        ) = None
        self.options: dict[str, Any] = {}
        self._set_k(bucket.length)
        formats = compression.formats()
        # The cost model chooses among several in the first exchange, since that needs all ranks.
        self.format = formats[0] if len(formats) == 1 else None

    def _set_k(self, length: int) -> None:
        self._density = self.compression.density_at(self._progress.steps)
        self.k = selected(self._density, length)
        # During density warm-up k changes every step. Keep the learnt region boundaries, and the
        # nodes, because finding them is a collective.
        kept = {name: self.options[name] for name in self.options if name in ("regions", "nodes")}
        self.options = {**self.compression.options(self.k, length), **kept}

    @property
    def regions(self) -> Regions | None:
        """Return Ok-Topk's region boundaries, kept between steps; None for other methods."""
        return self.options.get("regions")

    @property
    def signature(self) -> str:
        """Return the options and, during density warm-up, the step."""
        # k then depends on the step: ranks that disagree on it would select different numbers.
        return self._signature + (f" at step {self._progress.steps}" if self._is_warming_up else "")

    @property
    def _is_warming_up(self) -> bool:
        return self._progress.steps < self.compression.warmup_steps

    @property
    def finds_nonfinite(self) -> bool:
        """Return whether non-finite values are found in the picks, which all ranks check.

        The selection puts such values first. With Adam's moments that is too late: the moments
        would already include them.
        """
        return not self.residual.has_moments

    def __call__(self, bucket: Bucket, transport: Transport) -> Exchanged:
        algorithm = self.compression.algorithm
        if self._is_warming_up or self._density != self.compression.density:
            self._set_k(bucket.length)
        if self.format is None:
            self.format = quickest_format(self.compression, bucket, transport)
        transport = transport_of(transport, bucket, bucket.device.type == "cuda")
        sampling_seconds = gather_as_adam_step(bucket, self.residual, transport) or 0.0
        with profiled("select"):
            begun = Timestamp(bucket.device)
            picked = self._select(bucket, transport)
            selected_at = Timestamp(bucket.device)
            select_seconds, ready_at = begun.seconds_until(selected_at), ready(bucket, selected_at)
        # Seconds of the exchange not spent waiting are spent on coding and merging.
        picked_at, waited = time.perf_counter(), transport.traffic.wait_seconds
        coded_before = coded()
        self._result = None
        # All ranks refuse non-finite values alike; the picks then stay in the residuals.
        with profiled("exchange"), suppress(NonFiniteError):
            update, returned = self._reduce(picked, transport, self.format)
            update, rest = bucket.fit(update)  # the same on every rank
            kept = None if rest is None else self._own_part(rest, transport)
            self._result = picked, update, returned, kept
        communicate_seconds = time.perf_counter() - picked_at
        # Only the second moment's sample uses allreduce; not all transports count its bytes.
        shares = self.residual.shares_second_moment
        return Exchanged(
            algorithm,
            picked.indices.size,
            self._result[1].indices.size if self._result else 0,
            select_seconds,
            communicate_seconds + sampling_seconds,
            communicate_seconds - (transport.traffic.wait_seconds - waited),
            finite=self._result is not None,
            bytes_counted=not shares or transport.counts_allreduce,
            ready_at=ready_at,
            coded=coded(coded_before),
        )

    def apply(self, bucket: Bucket) -> None:
        """Remove the sent entries, except returned ones, from the residual; apply the update."""
        assert self._result is not None
        picked, update, returned, kept = self._result
        self._result = None
        self._remove_sent(picked, returned, update)
        if kept is not None:  # add it after the picks are cleared: it has the same indices
            self.residual.add(kept)
        bucket.scatter_sparse(update)

    def _remove_sent(
        self, picked: SparseVector, returned: SparseVector, update: SparseVector
    ) -> None:
        self.residual.remove_sent(picked, returned, update)

    def _own_part(self, rest: SparseVector, transport: Transport) -> SparseVector | None:
        """Return this rank's part of the rest that the gradients' dtype cannot hold."""
        # Only one rank keeps it: the rest is part of the sum, and the same on all ranks.
        return rest if transport.rank == 0 else None

    def _select(self, bucket: Bucket, transport: Transport) -> SparseVector:
        """Accumulate and select."""
        if self.residual.has_moments:
            # `flat` now holds Adam's steps, which already include this rank's weight.
            return self.residual.accumulate_and_select(bucket.flat, self.k)
        return self.residual.accumulate_and_select(bucket.addend(), self.k, bucket.weight)

    def _reduce(
        self, picked: SparseVector, transport: Transport, format: Format
    ) -> tuple[SparseVector, SparseVector]:
        if isinstance(self.compression, Hierarchical) and "nodes" not in self.options:
            self.options["nodes"] = find_nodes(transport, self.compression.node_size)
        reduction = partial(
            ALGORITHMS[self.compression.algorithm],
            k=self.k,
            transport=transport,
            format=format,
            **self.options,
        )
        return reduce_where_supported(
            reduction, picked, transport, self.compression.algorithm, format
        )


def quickest_format(compression: SparseCompression, bucket: Bucket, transport: Transport) -> Format:
    """Return the format that the calibrated model predicts to be fastest; equal on all ranks.

    Any hierarchy is modelled as picks inside nodes and gtopk between them.
    """
    calibration = calibration_of(transport, bucket.device)

    def seconds(format: Format) -> float:
        candidate = compression.candidate(format)
        network, rates = calibration.network, calibration.rates
        return predict(candidate, bucket.length, network, rates, bucket.dtype.itemsize).seconds

    return min(compression.formats(), key=seconds)


class DenseExchange:
    """Send every entry with the transport's allreduce: the baseline, without compression.

    residual: from earlier sparse steps; each step sends a fraction of it along (`drain_fraction`).
    """

    signature = "dense"

    def __init__(self, residual: Residual | None = None) -> None:
        self.residual = residual
        self._fraction = 1.0  # of the residual, sent in this step
        self._kept: torch.Tensor | None = None  # the part of this step's sum that this rank keeps
        self._sum: GradientSum | None = None  # used instead of the bucket's vector
        self._is_alone = False  # a single rank: its gradients are the sum

    @property
    def finds_nonfinite(self) -> bool:
        """Return whether a gradient's NaN or infinity shows in the sum, which is checked."""
        return self.residual is None or not self.residual.has_moments

    def __call__(self, bucket: Bucket, transport: Transport) -> Exchanged:
        self._is_alone = (
            transport.size == 1 and self.residual is None and bucket.weight * bucket.scale == 1.0
        )
        if self._is_alone:  # nothing to add or scale: the gradients already are the sum
            begun = Timestamp(bucket.device)
            return _dense(bucket, transport, begun, begun, finite=bucket.all_finite())
        by_torch = self.residual is None and only_torch_reaches(bucket, transport)
        transport = transport_of(transport, bucket, by_torch or bucket.device.type == "cuda")
        # Check again: if some ranks have no GPU, all ranks now have another transport.
        if by_torch and only_torch_reaches(bucket, transport):
            begun = Timestamp(bucket.device)
            with profiled("exchange"):
                self._sum = GradientSum(bucket, transport)
                finite = self._sum.fits(bucket)
                return _dense(bucket, transport, begun, begun, finite=finite)
        sampling_seconds = gather_as_adam_step(bucket, self.residual, transport)
        begun = Timestamp(bucket.device)
        with profiled("select"):
            gradient = bucket.gather() if sampling_seconds is None else bucket.flat
            if self.residual is not None:
                self._fraction = self.residual.add_fraction_to(gradient)
        added = Timestamp(bucket.device)
        with profiled("exchange"):
            if is_on_device(gradient) and not transport.supports_device_messages:
                with bucket.flat_on_host() as on_host:
                    transport.allreduce(on_host)
            else:
                transport.allreduce(gradient)
            # The error is that of the sum, equal on all ranks: if all kept it, it would count
            # P-fold.
            keeps = self.residual is not None and transport.rank == 0
            self._kept = bucket.rounding_error() if keeps else None
            dense = _dense(bucket, transport, begun, added)
        communicate_seconds = dense.communicate_seconds + (sampling_seconds or 0.0)
        return replace(dense, communicate_seconds=communicate_seconds)

    def apply(self, bucket: Bucket) -> None:
        """Put the sum in place; the residual keeps the part of it that 16 bits cannot hold."""
        if self._is_alone:
            return
        if self._sum is not None:
            self._sum.apply(bucket)
            self._sum = None
            return
        if self.residual is not None:
            # Only now: the step could have been skipped after the fraction was added.
            self.residual.subtract_fraction(self._fraction)
            if self._kept is not None:
                self.residual.add_dense(self._kept)
        self._kept = None
        bucket.scatter()

    def sends_all(self) -> bool:
        """Return whether nothing is left in the residual after this step."""
        if self.residual is None:
            return True
        sends = self.residual.is_empty or self._fraction == 1.0
        return sends and not self.residual.has_stashed


_CASTS: Final[dict[type[Compressor], torch.dtype]] = {
    compressor: compressor.sent_as for compressor in (FP16Compressor, BF16Compressor)
}


class CompressorExchange:
    """Send every entry, compressed by a Horovod Compressor and fused by dtype."""

    residual = None
    finds_nonfinite = False  # a Compressor may turn NaN into finite values

    def __init__(self, compressor: type[Compressor]) -> None:
        self.compressor = compressor
        self.signature = f"dense {compressor.__name__}"
        # For a Compressor that only casts: a reused buffer for the cast values. Fresh memory in
        # each step takes several times as long to write as the cast itself.
        self._sent_as = _CASTS.get(compressor)
        self._sent: torch.Tensor | None = None

    def __call__(self, bucket: Bucket, transport: Transport) -> Exchanged:
        transport = transport_of(transport, bucket, bucket.device.type == "cuda")
        began = Timestamp(bucket.device)
        # Weight first: in fp16 the sum of unweighted gradients may overflow though the mean fits.
        bucket.gather()
        if self._sent_as is not None and bucket.views[0].is_floating_point():
            seconds = self._reduce_cast(bucket, transport, self._sent_as)
        else:
            seconds = self._reduce_compressed(bucket, transport)
        return _dense(bucket, transport, began, communicate_seconds=seconds)

    def _reduce_cast(self, bucket: Bucket, transport: Transport, dtype: torch.dtype) -> float:
        if self._sent is None:
            self._sent = torch.empty(bucket.length, dtype=dtype, device=bucket.device)
        parts = bucket.split(self._sent)
        torch._foreach_copy_(parts, bucket.views)
        seconds = _allreduce(self._sent, transport)
        torch._foreach_copy_(bucket.views, parts)
        return seconds

    def _reduce_compressed(self, bucket: Bucket, transport: Transport) -> float:
        compressed = [self.compressor.compress(view) for view in bucket.views]
        # A Compressor may leave some tensors unchanged, such as integers.
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index, (tensor, _) in enumerate(compressed):
            by_dtype.setdefault(tensor.dtype, []).append(index)
        seconds = 0.0
        for indices in by_dtype.values():
            tensors = [compressed[index][0] for index in indices]
            fused = torch.cat([tensor.reshape(-1) for tensor in tensors])
            seconds += _allreduce(fused, transport)
            parts = fused.split([tensor.numel() for tensor in tensors])
            for index, tensor, part in zip(indices, tensors, parts, strict=True):
                reduced, context = part.view(tensor.shape), compressed[index][1]
                bucket.views[index].copy_(self.compressor.decompress(reduced, context))
        return seconds

    def apply(self, bucket: Bucket) -> None:
        """Replace the gradients with the sum."""
        bucket.scatter()


def _allreduce(flat: torch.Tensor, transport: Transport) -> float:
    """Sum a contiguous tensor over the ranks, in place; return the seconds taken."""
    begun = time.perf_counter()
    with profiled("exchange"):
        if transport.carries(flat):
            transport.allreduce(flat)  # type: ignore[arg-type]
        elif is_host_array(flat):
            transport.allreduce(view_dense(flat))
        else:
            array = to_array(flat)
            transport.allreduce(array)
            flat.copy_(from_array(array, flat))
    return time.perf_counter() - begun


def _dense(
    bucket: Bucket,
    transport: Transport,
    begun: Timestamp,
    added: Timestamp | None = None,
    communicate_seconds: float = 0.0,
    finite: bool | None = None,
) -> Exchanged:
    """Return the result of a dense exchange that ends now.

    added: when the sum started; None: it took communicate_seconds in all, between other work.
    finite: whether the sum is finite, also in the gradients' dtypes; None: check the bucket's
        vector.
    """
    ended = Timestamp(bucket.device)
    if finite is None:
        finite = bucket.fits_sum()
    if added is not None:
        communicate_seconds = added.seconds_until(ended)
    return Exchanged(
        "dense",
        bucket.length,
        bucket.length,
        begun.seconds_until(ended) - communicate_seconds,
        communicate_seconds,
        0.0,
        finite,
        transport.counts_allreduce,
        ready(bucket, ended),
    )


def transport_of(transport: Transport, bucket: Bucket, on_gpu: bool) -> Transport:
    """Return the transport for a bucket's vectors, which may be on a GPU or on the host."""
    return transport.carrying(on_gpu, (bucket.length, bucket.dtype.name))


def ready(bucket: Bucket, now: Timestamp) -> float | None:
    """Return when a bucket's gradients were computed on a GPU; None on the host.

    now: a timestamp that the GPU has reached.
    """
    if bucket.device.type == "cpu":
        return None
    # GPU events only give time differences, so count back from the host's clock.
    return time.perf_counter() - bucket.ready.seconds_until(now)


def open_residual(
    bucket: Bucket, compression: ErrorFeedback, *, has_owner_errors: bool = False
) -> Residual:
    """Create the empty residual of a bucket."""
    return Residual(
        bucket.length,
        bucket.dtype,
        compression.momentum_correction,
        bucket.device,
        masked=compression.factor_masking,
        betas=compression.adam_correction,
        sizes=bucket.sizes,
        has_owner_errors=has_owner_errors,
    )


def gather_as_adam_step(
    bucket: Bucket, residual: Residual | None, transport: Transport
) -> float | None:
    """Replace the gradients in `flat` with Adam's weighted steps.

    This is the optimizer's work, the same for every exchange, so it is left out of their seconds.
    Returns the seconds spent on exchanging gradient samples; None if no steps are computed here.
    """
    if residual is None or not residual.has_moments:
        return None
    return residual.to_adam_step(bucket.gather(), bucket.share, transport)

"""The method on one screen: accumulate, select, exchange, apply.

An Exchange takes this rank's weighted gradient in a bucket and leaves the agreed update there. It
runs on the engine's thread, after all ranks agreed that they are about to do the same.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from collectives.algorithms import ALGORITHMS
from collectives.errors import NonFiniteError
from collectives.kernels import all_finite
from collectives.transports import Transport
from collectives.vector import SparseVector

from .arrays import from_array, to_array
from .buckets import Bucket
from .compression import Compressor, NoneCompressor, SparseCompression
from .residual import Residual


@dataclass(frozen=True)
class Exchanged:
    """What an exchange did, besides leaving the update in the bucket.

    finite: whether the update is; the same on every rank, as the update is. A sum can overflow
            where no gradient did.
    """

    selected: int
    updated: int
    communicate_seconds: float
    merge_seconds: float
    finite: bool
    bytes_counted: bool


class Exchange(Protocol):
    """One way to turn the ranks' gradients into one update."""

    facts: str  # what must be equal on all ranks, in words

    def __call__(self, bucket: Bucket, transport: Transport) -> Exchanged:
        """Replace `bucket.flat` by the sum over ranks."""


class SparseExchange:
    """Top-k with error feedback: what is not sent stays in the residual."""

    def __init__(self, bucket: Bucket, compression: SparseCompression) -> None:
        self.k = compression.selected(bucket.flat.size)
        self.reduce = ALGORITHMS[compression.algorithm]
        self.residual = Residual(
            bucket.flat.size, bucket.flat.dtype, compression.momentum_correction
        )
        self.facts = (
            f"{compression.algorithm} density={compression.density} "
            f"momentum_correction={compression.momentum_correction}"
        )

    def __call__(self, bucket: Bucket, transport: Transport) -> Exchanged:
        picked = self.residual.accumulate_and_select(bucket.flat, self.k)
        begun, waited = time.perf_counter(), transport.traffic.wait_seconds
        outcome: tuple[SparseVector, SparseVector] | None = None
        with suppress(NonFiniteError):  # on every rank alike: the picks stay in the residuals
            outcome = self.reduce(picked, self.k, transport)
        communicate_seconds = time.perf_counter() - begun
        merge_seconds = communicate_seconds - (transport.traffic.wait_seconds - waited)
        updated = 0
        if outcome is not None:
            update, returned = outcome
            updated = update.entries
            self.residual.settle(picked, returned)
            bucket.flat.fill(0)
            bucket.flat[update.indices] = update.values
        return Exchanged(
            picked.entries,
            updated,
            communicate_seconds,
            merge_seconds,
            finite=outcome is not None,
            bytes_counted=True,
        )


class DenseExchange:
    """Every entry, by the transport's allreduce: the baseline, and what 'off' means."""

    facts = "dense"

    def __call__(self, bucket: Bucket, transport: Transport) -> Exchanged:
        begun = time.perf_counter()
        transport.allreduce(bucket.flat)
        return _dense(bucket, transport, time.perf_counter() - begun)


class CompressorExchange:
    """Every entry, in the form that a Horovod Compressor gives it, fused by dtype."""

    def __init__(self, compressor: type[Compressor]) -> None:
        self.compressor = compressor
        self.facts = f"dense {compressor.__name__}"

    def __call__(self, bucket: Bucket, transport: Transport) -> Exchanged:
        compressed = [self.compressor.compress(view) for view in bucket.views]
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index, (tensor, _) in enumerate(compressed):
            by_dtype.setdefault(tensor.dtype, []).append(index)
        seconds = 0.0
        for indices in by_dtype.values():
            tensors = [compressed[index][0] for index in indices]
            fused = np.concatenate([to_array(tensor) for tensor in tensors])
            begun = time.perf_counter()
            transport.allreduce(fused)
            seconds += time.perf_counter() - begun
            parts = np.split(fused, np.cumsum([tensor.numel() for tensor in tensors])[:-1])
            for index, tensor, part in zip(indices, tensors, parts, strict=True):
                reduced = from_array(part, tensor)
                context = compressed[index][1]
                bucket.views[index].copy_(self.compressor.decompress(reduced, context))
        return _dense(bucket, transport, seconds)


def _dense(bucket: Bucket, transport: Transport, seconds: float) -> Exchanged:
    n = bucket.flat.size
    return Exchanged(n, n, seconds, 0.0, all_finite(bucket.flat), transport.counts_allreduce)


def open_exchange(bucket: Bucket, compression: object) -> Exchange:
    """Return the exchange for what the user passed as `compression`.

    Raises TypeError for anything but a sparse compression or a Compressor class.
    """
    if isinstance(compression, SparseCompression):
        return SparseExchange(bucket, compression)
    if compression is NoneCompressor:
        return DenseExchange()
    if isinstance(compression, type) and hasattr(compression, "compress"):
        return CompressorExchange(compression)
    raise TypeError(
        "compression must be Compression.none, Compression.fp16, Compression.topk(density=...), "
        f"Compression.gtopk(density=...) or a Compressor class, got {compression!r}"
    )

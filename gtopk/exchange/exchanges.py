"""The exchange that belongs to a compression."""

from __future__ import annotations

from typing import Any

from ..compression import (
    Automatic,
    ErrorFeedback,
    Hierarchical,
    NoneCompressor,
    Shards,
    SparseCompression,
)
from .automatic import AutomaticExchange
from .buckets.buckets import Bucket
from .exchange import CompressorExchange, DenseExchange, Exchange, Progress, SparseExchange
from .node_exchange import NodeExchange
from .shard_exchange import ShardExchange


def open_exchange(
    bucket: Bucket,
    compression: Any,
    progress: Progress,
    share: float = 1.0,
    room_share: float = 1.0,
) -> Exchange:
    """Return the exchange for what the user passed as `compression`, which was checked.

    share: this bucket's, of the elements of a step that are compressed.
    room_share: this bucket's, of the time from when its gradients are ready until backward ends.
    """
    if isinstance(compression, Hierarchical) and compression.inside == "dense":
        return NodeExchange(bucket, compression, progress)
    if isinstance(compression, Shards):
        return ShardExchange(bucket, compression, progress)
    if isinstance(compression, SparseCompression):
        return SparseExchange(bucket, compression, progress)
    if isinstance(compression, Automatic):
        return AutomaticExchange(bucket, compression, progress, share, room_share)
    if compression is NoneCompressor:
        return DenseExchange()
    return CompressorExchange(compression)


def require_compression(compression: object) -> None:
    """Raise TypeError for a value that is neither a `Compression` method nor a Compressor class."""
    is_class = isinstance(compression, type) and hasattr(compression, "compress")
    if is_class or isinstance(compression, ErrorFeedback):
        return
    raise TypeError(
        "compression must be Compression.none, .fp16, .bf16, Compression.topk(density=...), "
        "Compression.gtopk(density=...), .oktopk, .hierarchical, .shards, .auto or a Compressor "
        "class, "
        f"got {compression!r}"
    )

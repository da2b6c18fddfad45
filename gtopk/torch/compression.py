"""Horovod's import path for the compression choices."""

from ..compression import (
    Automatic,
    BF16Compressor,
    Compression,
    Compressor,
    FP16Compressor,
    GTopK,
    Hierarchical,
    NoneCompressor,
    OkTopK,
    Shards,
    TopK,
)

__all__ = [
    "Automatic",
    "BF16Compressor",
    "Compression",
    "Compressor",
    "FP16Compressor",
    "GTopK",
    "Hierarchical",
    "NoneCompressor",
    "OkTopK",
    "Shards",
    "TopK",
]

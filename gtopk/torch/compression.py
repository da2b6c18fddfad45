"""Horovod's import path for the compression choices."""

from ..compression import (
    Automatic,
    Compression,
    Compressor,
    FP16Compressor,
    GTopK,
    Hierarchical,
    NoneCompressor,
    OkTopK,
    TopK,
)

__all__ = [
    "Automatic",
    "Compression",
    "Compressor",
    "FP16Compressor",
    "GTopK",
    "Hierarchical",
    "NoneCompressor",
    "OkTopK",
    "TopK",
]

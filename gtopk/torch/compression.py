"""Horovod's import path for the compression choices."""

from ..compression import Compression, Compressor, FP16Compressor, GTopK, NoneCompressor, TopK

__all__ = ["Compression", "Compressor", "FP16Compressor", "GTopK", "NoneCompressor", "TopK"]

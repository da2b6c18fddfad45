"""Data sets as tensors."""

from .classification import Classification, load

__all__ = ["Classification", "load"]

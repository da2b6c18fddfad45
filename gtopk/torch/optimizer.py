"""Horovod's import path for DistributedOptimizer."""

from ..optimizer import DistributedOptimizer

__all__ = ["DistributedOptimizer"]

"""Horovod's import path for DistributedOptimizer."""

from ..optim.distributed import DistributedOptimizer

__all__ = ["DistributedOptimizer"]

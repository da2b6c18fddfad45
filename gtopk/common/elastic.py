"""Horovod's import path for what its states of all frameworks share."""

from ..torch.elastic import ObjectState, State, run_fn

__all__ = ["ObjectState", "State", "run_fn"]

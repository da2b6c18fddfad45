"""Horovod's import path for the base classes of elastic states of all frameworks."""

from ..errors import HorovodInternalError, HostsUpdatedInterrupt
from ..torch.elastic import ObjectState, State, run_fn

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt", "ObjectState", "State", "run_fn"]

"""Horovod's import path for what its states of all frameworks share."""

from ..errors import HorovodInternalError, HostsUpdatedInterrupt
from ..torch.elastic import ObjectState, State, run_fn

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt", "ObjectState", "State", "run_fn"]

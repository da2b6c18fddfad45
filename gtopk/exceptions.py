"""The documented import path of Horovod's exceptions; they are defined in `errors`."""

from .errors import HorovodInternalError, HostsUpdatedInterrupt, InvalidCallError

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt", "InvalidCallError"]

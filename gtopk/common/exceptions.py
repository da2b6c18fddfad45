"""Horovod's import path for its exceptions."""

from ..exceptions import HorovodInternalError

__all__ = ["HorovodInternalError"]

"""The exceptions of Horovod's API."""


class HorovodInternalError(RuntimeError):
    """An operation failed across ranks: they disagreed, or one of them is gone."""

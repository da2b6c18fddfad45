"""The exceptions of Horovod's API."""


class HorovodInternalError(RuntimeError):
    """An operation failed across ranks: they disagreed, or one of them is gone.

    operation: its name; "" where none had begun.
    """

    operation = ""


class InvalidCallError(HorovodInternalError, ValueError):
    """A call that cannot be made here, whatever the other ranks do; nothing was sent.

    Horovod raises the one or the other, by the function: who catches either catches this.
    """


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts have changed: ranks were added, or are to be removed.

    skip_sync: whether the ranks that stay are still in step, so that nothing needs to be sent.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        self.skip_sync = skip_sync
        super().__init__("the hosts of the job have changed")

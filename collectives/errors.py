"""The errors of operations between ranks.

    CollectiveError            anything below; a RuntimeError
    |-- MessageError           a peer's message is malformed (names the sender)
    |-- MismatchError          ranks called with different arguments (nothing is lost; go on)
    |-- NonFiniteError         NaN or infinity in a contribution or a sum (nothing is lost; go on)
    `-- PeerError              a peer left, died or stayed silent (the job cannot go on)
        `-- PeerTimeoutError   it stayed silent longer than the transport waits

Bad arguments of a call are ValueError or TypeError, as everywhere in Python.
"""


class CollectiveError(RuntimeError):
    """Something went wrong between ranks."""


class MessageError(CollectiveError):
    """A peer's message is malformed."""


class MismatchError(CollectiveError):
    """The ranks called the same operation with different arguments."""


class NonFiniteError(CollectiveError):
    """NaN or infinity in a contribution or in the sum; raised on all ranks alike.

    rank: the lowest rank that found it; None when no contribution, only the sum, is not finite.
    """

    def __init__(self, rank: int | None) -> None:
        self.rank = rank
        found = (
            "the sum of the ranks' contributions overflowed"
            if rank is None
            else f"rank {rank} found NaN or infinity in its contribution or in a sum it made"
        )
        super().__init__(f"{found}; no rank got an update: skip this step on all of them")


class PeerError(CollectiveError):
    """A peer is gone, and this job cannot go on.

    Only `leave` the transport: the next operation would take late messages of this one for its own.
    """


class PeerTimeoutError(PeerError):
    """A peer stayed silent longer than the transport waits."""

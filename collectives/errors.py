"""What can go wrong between ranks.

    CollectiveError            anything below; a RuntimeError
    |-- MessageError           a peer's message is malformed (names the sender)
    |-- MismatchError          ranks asked for different things (nothing was lost; the job goes on)
    `-- PeerError              a peer left, died or stayed silent (the job cannot go on)
        `-- PeerTimeoutError   it stayed silent longer than the transport waits

Bad arguments of a call are ValueError or TypeError, as everywhere in Python.
"""


class CollectiveError(RuntimeError):
    """Something went wrong between ranks."""


class MessageError(CollectiveError):
    """A peer's message is malformed."""


class MismatchError(CollectiveError):
    """The ranks asked for different things at the same place."""


class PeerError(CollectiveError):
    """A peer is gone, and this job cannot go on."""


class PeerTimeoutError(PeerError):
    """A peer stayed silent longer than the transport waits."""

"""The engine: operations of all ranks, matched by name, run by one thread that owns the transport.

operation.py         an operation, how ranks announce it, and what observers see of it
engine.py            the thread: when a cycle begins, and what follows from it
readiness_table.py   which rank is ready for which operation; the same on every rank
execution.py         what is run, and in which order; stalls; settings
fusion.py            small dense arrays reduced as one, on the host or on a GPU
agreement.py         the texts of errors about what ranks disagree on
clocks.py            how far this rank's clock is ahead of rank 0's
"""

from .engine import Engine
from .execution import Settings
from .operation import Event, Observer, Operation, ShadowWork, Work

__all__ = ["Engine", "Event", "Observer", "Operation", "Settings", "ShadowWork", "Work"]

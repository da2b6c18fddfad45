"""The engine: operations of all ranks, matched by name, run by one thread that owns the transport.

operation.py         something all ranks do together, as it is announced and observed
engine.py            the thread: when a cycle begins, and what follows from it
readiness_table.py   who is ready for what, the same on every rank
execution.py         what is run, and in which order; stalls; settings
"""

from .engine import Engine
from .execution import Settings
from .operation import Event, Observer, Operation, StandIn, Work

__all__ = ["Engine", "Event", "Observer", "Operation", "Settings", "StandIn", "Work"]

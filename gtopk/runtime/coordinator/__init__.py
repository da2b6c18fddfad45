"""The engine: operations of all ranks, matched by name, run by one thread that owns the transport.

operation.py         something all ranks do together, and its outcome; what an observer hears of it
engine.py            the thread: when a cycle begins, and what follows from it
announcement.py      what a rank tells the others in a cycle, and how all get it
readiness_table.py   who is ready for what, the same on every rank
execution.py         what is run, and in which order; what to say while others are not ready
settings.py          the settings of cycles, the cache, fusion and stalls
"""

from .engine import Engine
from .execution import Settings
from .operation import Event, Observer, Operation, StandIn, Work

__all__ = ["Engine", "Event", "Observer", "Operation", "Settings", "StandIn", "Work"]

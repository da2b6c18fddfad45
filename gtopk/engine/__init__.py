"""The engine: operations of all ranks, matched by name, run by one thread that owns the transport.

operation.py   something all ranks do together, and its outcome
engine.py      the thread: when a cycle begins, and what is run after it
observer.py    what a timeline hears
"""

from .engine import Engine
from .observer import Event, Observer
from .operation import Operation, Work

__all__ = ["Engine", "Event", "Observer", "Operation", "Work"]

"""The engine: matches operations across ranks by name and runs them in one thread.

operation.py         an operation, its announcement to the other ranks, events for observers
engine.py            the engine thread, which owns the transport: when a cycle starts
readiness_table.py   which rank is ready for which operation; the same table on every rank
execution.py         runs operations in order; stalls; settings
fusion.py            reduces small dense arrays together, on the host or on a GPU
agreement.py         error texts about disagreements between ranks
clocks.py            offset of this rank's clock from rank 0's
"""

from .engine import Engine
from .execution import Settings
from .operation import Event, Observer, Operation, ShadowWork, Work

__all__ = ["Engine", "Event", "Observer", "Operation", "Settings", "ShadowWork", "Work"]

"""Left out: what a class of the user's own must define and does not.

`State` and `StateHandler` are Horovod's, to derive from; their methods are abstract as there: they
raise when they are called, not when an object is made.
"""

from __future__ import annotations

from typing import Final

WHERE_KEPT: Final = " for GTOPK_ELASTIC_DIR, where commits are written to disk"


def left_out(of: object, method: str, why: str = "") -> NotImplementedError:
    """Return the error that says so."""
    return NotImplementedError(f"{type(of).__name__} must define {method}(){why}")

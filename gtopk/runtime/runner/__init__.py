"""`gtopk.run(func, np=4)`: call a function on ranks that are started for it, as horovod.run does.

    this process                              rank r of np
    Arguments      what was asked for
    Call           func by name, args ------> worker: imports func, calls it
    CallServer     one result a rank <------- its result, or its error with the traceback
    Ranks          mpirun or torchrun; ended, with every process of theirs, when run returns

What travels is typed msgpack (the object codec) over TCP, after both sides have shown that they
know the secret of this job.
"""

from __future__ import annotations

from ...errors import RankError
from .ranks import run

__all__ = ["RankError", "run"]

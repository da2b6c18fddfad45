"""`gtopk.run(func, np=4)`: call a function on newly started ranks, like horovod.run.

    this process                              rank r of np
    ranks.py       run: checks arguments, starts ranks with mpirun, srun or torchrun, and ends
                   all their processes before it returns
    call.py        func by name, args ------> worker.py: imports func, calls it
    call_server.py one result a rank <------- its result, or its error with the traceback

Messages are typed msgpack (the object codec) over TCP; both sides first prove that they know the
job's secret.
"""

from __future__ import annotations

from ...errors import RankError
from .ranks import run

__all__ = ["RankError", "run"]

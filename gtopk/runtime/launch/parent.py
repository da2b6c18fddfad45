"""Parent: the launcher's process that started this one; is it gone, and whom else has it here?"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from typing import Final

from .launched import Launched
from .watchdog import variable_of

# By the variable of a rank's number: one that only ranks have, and one that says how many of them
# their launcher starts on a host.
_OF_A_RANK: Final = {
    "RANK": ("TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE"),
    "OMPI_COMM_WORLD_RANK": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "PMI_RANK": ("PMI_RANK", "MPI_LOCALNRANKS"),
}
_ASK_SECONDS: Final = 1.0

_parent = os.getppid()  # at the import: who looks later may find who adopts orphans


def _look() -> None:
    global _parent
    _parent = os.getppid()


os.register_at_fork(after_in_child=_look)


def agent(environ: Mapping[str, str] = os.environ) -> int:
    """Return torchrun's agent, where it has started this process, be it gone or not; else 0."""
    return _parent if environ.get("TORCHELASTIC_RUN_ID") else 0


def launcher(environ: Mapping[str, str] = os.environ) -> int:
    """Return what has started this process: torchrun's agent, a daemon of Open MPI's; else 0.

    Of no other: who sets RANK by hand may do so in a shell that ends before its ranks.
    """
    return agent(environ) or (_parent if environ.get("OMPI_COMM_WORLD_RANK") else 0)


def ranks_here(job: Launched, environ: Mapping[str, str] = os.environ) -> int:
    """Return how many ranks of a job this process's parent has started; 0 where nobody can tell.

    For one, where the parent is a shell between the launcher and this rank. A rank that is alone
    has nobody to miss either.
    """
    mark, count = _OF_A_RANK.get(job.variables[0], ("", ""))
    if mark not in environ or variable_of(_parent, mark) != "":
        return 0
    said = environ.get(count, "")
    return int(said) if said.isdecimal() and int(said) > 1 else 0


def is_gone(environ: Mapping[str, str] = os.environ) -> bool:
    """Tell whether the launcher that has started this process is there no more."""
    started = launcher(environ)
    if not started:
        return False
    return os.getppid() != started or (not agent(environ) and _hears_nobody(environ))


def _hears_nobody(environ: Mapping[str, str]) -> bool:
    """Tell whether nobody listens any more where Open MPI's daemon of this host heard its ranks.

    It may have gone before this was imported.
    """
    uris = (value for name, value in environ.items() if name.startswith("PMIX_SERVER_URI"))
    match = next(filter(None, (re.search(r"tcp4://([\d.]+):(\d+)", uri) for uri in uris)), None)
    if match is None:
        return False
    try:
        socket.create_connection((match[1], int(match[2])), _ASK_SECONDS).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False

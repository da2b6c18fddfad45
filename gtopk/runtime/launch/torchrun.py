"""How ranks are started on one machine where there is no MPI: torchrun."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def torchrun_command(ranks: int, program: Sequence[str], python: str = sys.executable) -> list[str]:
    """Return the command that runs `program` (its executable first) on `ranks` ranks here.

    Behind --, torchrun reads nothing: neither does it drop a -- of the program's own, nor take an
    argument such as --log for an ambiguous one of its own.
    """
    return [
        *(python, "-m", "torch.distributed.run", "--standalone"),
        *(f"--nproc-per-node={ranks}", "--no-python", "--", *program),
    ]

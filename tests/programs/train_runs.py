"""Run mpi_scripts/train.py several times on these ranks, and print how each run went on each rank.

Argument: a JSON list of the runs' argument lists; "{rank}" in them becomes the rank. Prints a JSON
list of runs, each a list by rank of [exit code, stdout, stderr].
"""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys
from pathlib import Path

import gtopk.torch as hvd

TRAIN = Path(__file__).parent.parent.parent / "mpi_scripts" / "train.py"


def run(arguments: list[str]) -> list[object]:
    """Run the script as `python train.py ...` does; a failed run leaves the world by itself."""
    sys.argv = [str(TRAIN), *(text.replace("{rank}", str(hvd.rank())) for text in arguments)]
    code: object = 0
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        try:
            runpy.run_path(str(TRAIN), run_name="__main__")
        except SystemExit as end:
            code = end.code
    hvd.shutdown()
    return [code, out.getvalue(), err.getvalue()]


runs = []
for arguments in json.loads(sys.argv[1]):
    hvd.init()
    ended = run(arguments)
    hvd.init()
    runs.append(hvd.allgather_object(ended))
if hvd.rank() == 0:
    print(json.dumps(runs))

"""Run a script of mpi_scripts several times on these ranks; print each run's result on each rank.

Arguments: its name; a JSON list of the runs' argument lists, in which "{rank}" becomes the rank.
Prints a JSON list of runs, each a list by rank of [exit code, stdout, stderr].
"""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys
from pathlib import Path

import light_torch  # noqa: F401

import gtopk.torch as hvd

SCRIPT = Path(__file__).parents[2] / "mpi_scripts" / sys.argv[1]


def run(arguments: list[str]) -> list[object]:
    """Run the script as `python SCRIPT ...` does; a failed run leaves the world itself."""
    sys.argv = [str(SCRIPT), *(text.replace("{rank}", str(hvd.rank())) for text in arguments)]
    code: object = 0
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        try:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        except SystemExit as end:
            code = end.code
    hvd.shutdown()
    return [code, out.getvalue(), err.getvalue()]


runs = []
for arguments in json.loads(sys.argv[2]):
    hvd.init()
    ended = run(arguments)
    hvd.init()
    runs.append(hvd.allgather_object(ended))
if hvd.rank() == 0:
    print(json.dumps(runs))

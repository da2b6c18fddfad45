"""Run on any number of ranks: `mpi_scripts/bench_collectives.py`."""

from __future__ import annotations

import runpy
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "mpi_scripts" / "bench_collectives.py"

if __name__ == "__main__":
    runpy.run_path(str(SCRIPT), run_name="__main__")

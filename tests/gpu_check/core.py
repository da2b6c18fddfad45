"""Install the supplied wheels into a prefix, and build the C++ core if it is not built."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from common import arguments, record

from collectives.kernels import why_not_compiled
from gtopk.runtime.launch import find_mpirun

ROOT = Path(__file__).resolve().parents[2]


def install(wheels: list[Path], prefix: Path) -> None:
    """Install the wheels by prefix: an install by target leaves out Open MPI's lib."""
    how = ("--quiet", "--no-index", "--no-deps", "--no-compile", "--ignore-installed")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install")
    subprocess.run([*pip, *how, "--prefix", prefix, *wheels], check=True)


def main() -> None:
    """Install, build, and record the result."""
    wheels = sorted(Path(arguments().wheels).glob("*.whl"))
    if wheels:
        # The runner has put <prefix>/bin first.
        install(wheels, Path(os.environ["PATH"].partition(":")[0]).parent)
    if why_not_compiled():
        build = ("setup.py", "--quiet", "build_ext", "--inplace")
        subprocess.run([sys.executable, *build], cwd=ROOT, check=True)
    # In another process, because this one has already loaded the kernels.
    program = (
        "from collectives.kernels import in_use, why_not_compiled as w; print(w() or in_use())"
    )
    kernels_in_use = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.strip()
    mpirun = find_mpirun()
    record("installed", wheels=[w.name for w in wheels], mpirun=str(mpirun), kernels=kernels_in_use)
    assert mpirun, "no mpirun: the stages of several ranks need one"


if __name__ == "__main__":
    main()

"""Run a program on a C++ core with address and undefined-behaviour sanitizers.

    python tests/programs/sanitized.py FOLDER PROGRAM [ARGUMENTS]

The package is copied into FOLDER and its core built there, unless that was done before; several
processes may do so at once. Needs g++ with its sanitizers; exits with 77 without them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from collectives.kernels.host import library as sources
from tests.sharing import locked

ROOT = Path(__file__).parents[2]
NO_SANITIZERS = 77


def build(folder: Path) -> None:
    """Copy the package into the folder, and build its core there."""
    copy = folder / "collectives"
    shutil.copytree(ROOT / "collectives", copy, ignore=shutil.ignore_patterns("*.so", "*.pyc"))
    flags = [*sources.COMPILE_ARGUMENTS, "-O0", "-g", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(
        [
            *("g++", "-shared", "-fPIC", *flags, "-fsanitize=address,undefined"),
            *("-fno-sanitize-recover=all", f'-DGTOPK_SOURCES="{sources.fingerprint()}"'),
            *("-o", str(copy / sources.LIBRARY.relative_to(ROOT / "collectives"))),
            *map(str, sources.sources()),
        ],
        check=True,
    )


def main() -> int:
    folder, program, *arguments = sys.argv[1:]
    if shutil.which("g++") is None:
        return NO_SANITIZERS
    runtime = subprocess.run(
        ["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not Path(runtime).is_absolute():
        return NO_SANITIZERS
    with locked(Path(folder)):
        if not (Path(folder) / "collectives").exists():
            build(Path(folder))
    environment = {
        **os.environ,
        "PYTHONPATH": folder,
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
    }
    command = [sys.executable, program, *arguments]
    return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

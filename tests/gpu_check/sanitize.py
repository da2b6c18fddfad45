"""The kernels' small set under compute-sanitizer's tools.

    python3 tests/gpu_check/sanitize.py memcheck racecheck initcheck synccheck

A sanitized kernel is up to a hundred times slower: the tests of all kernels would take hours.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from runner import SKIPPED

HERE = Path(__file__).resolve().parent
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")


def main() -> int:
    """Run the small set under each tool; return 0 if none found an error."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tools", nargs="*", default=TOOLS, metavar="TOOL", help="default: all four")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args()
    if unknown := set(options.tools) - set(TOOLS):
        parser.error(f"no tool is named {', '.join(unknown)}; there are: {', '.join(TOOLS)}")
    if options.device == "cpu":
        print("needs a GPU: its kernels are watched")
        return SKIPPED
    if shutil.which("compute-sanitizer") is None:
        sys.exit("no compute-sanitizer here: it comes with CUDA's toolkit")
    path = os.pathsep.join(filter(None, [str(HERE.parents[1]), os.environ.get("PYTHONPATH")]))
    exit_codes = {}
    for tool in options.tools:
        print(f"== {tool}", flush=True)
        command = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "9")
        # CuPy's own kernels are not ours to check.
        only_ours = ("--kernel-name-exclude", "kns=cupy")
        job = (sys.executable, str(HERE / "small_set.py"))
        exit_codes[tool] = subprocess.run(
            [*command, *only_ours, *job], env={**os.environ, "PYTHONPATH": path}, check=False
        ).returncode
    found = [tool for tool, code in exit_codes.items() if code]
    print(f"found something: {', '.join(found)}" if found else "nothing found")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())

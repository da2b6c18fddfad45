"""The results page has every measurement, and every failure."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "mpi_scripts"
REAL = ("bench.sh", "bench_network.sh", "bench_predictions.sh")

# Prints its arguments; fails for the selection benchmark.
PYTHON = """#!/bin/sh
echo "ran $*"
case "$*" in *bench_selection.py*) echo "no memory" >&2; exit 3 ;; esac
"""
NETWORK = """#!/bin/sh
shift 3
exec "$@"
"""


def test_results_page_has_output_of_every_part_and_failures(tmp_path: Path) -> None:
    scripts, out = tmp_path / "mpi_scripts", tmp_path / "out"
    scripts.mkdir()
    for name in REAL:
        shutil.copy(SCRIPTS / name, scripts)
    for name, text in (("python", PYTHON), ("emulated_network.sh", NETWORK)):
        (scripts / name).write_text(text)
        (scripts / name).chmod(0o755)
    subprocess.run(
        [scripts / "bench.sh", out],
        env={"PATH": os.environ["PATH"], "PYTHON": str(scripts / "python")},
        check=True,
        capture_output=True,
        timeout=60,
    )
    results = (out / "results.md").read_text()
    assert results.startswith("# Measured on ")
    parts = dict(re.findall(r"^## (.+?)\n(.+?)(?=^## |\Z)", results, re.MULTILINE | re.DOTALL))
    expected = [
        "bench_selection",
        "adverse",
        "bench_wire",
        "bench_engine",
        "bench_engine",
        "optimizer",
    ]
    for shapes in ("one-50m", "resnet50-shapes", "160x1000", "1000x10"):
        expected += [f"--model {shapes} --rounds 9 --json", f"--model {shapes} --rounds 9 --ways"]
    expected += [
        "convergence.py",
        "simulated_scaling.py",
        "torchrun.json",
        "dense-library",
        "resnet18",
        "predictions.py",
    ]
    expected += ["--simulate", "lstm-ptb", "alexnet", "--compute real"]
    for (title, text), pattern in zip(parts.items(), expected, strict=True):
        assert re.search(rf"^ran .*{re.escape(pattern)}", text, re.MULTILINE)
        assert ("ended with exit code 3" in text) == title.startswith("Selection")
    assert "no memory" in parts["Selection"]
    # Each part's tables are in a file of their own.
    assert "torchrun.json" in (out / "network" / "results.txt").read_text()

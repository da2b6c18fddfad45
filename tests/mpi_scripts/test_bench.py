"""All that is measured is in the results, what has failed, too."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "mpi_scripts"
REAL = ("bench.sh", "bench_network.sh", "bench_predictions.sh")

# Says what it was asked for; selection fails.
PYTHON = """#!/bin/sh
echo "ran $*"
case "$*" in *bench_selection.py*) echo "no memory" >&2; exit 3 ;; esac
"""
NETWORK = """#!/bin/sh
shift 3
exec "$@"
"""


def test_results_have_every_part_and_what_each_has_said(tmp_path: Path) -> None:
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
    asked = [
        "bench_selection",
        "adverse",
        "bench_wire",
        "bench_engine",
        "bench_engine",
        "optimizer",
    ]
    for shapes in ("one-50m", "resnet50-shapes", "160x1000", "1000x10"):
        asked += [f"--model {shapes} --rounds 9 --json", f"--model {shapes} --rounds 9 --ways"]
    asked += [
        "convergence.py",
        "simulated_scaling.py",
        "torchrun.json",
        "dense-library",
        "resnet18",
        "predictions.py",
    ]
    asked += ["--simulate", "lstm-ptb", "alexnet", "--compute real"]
    for (title, said), word in zip(parts.items(), asked, strict=True):
        assert re.search(rf"^ran .*{re.escape(word)}", said, re.MULTILINE)
        assert ("ended with exit code 3" in said) == title.startswith("Selection")
    assert "no memory" in parts["Selection"]
    # The tables of a part are its own file.
    assert "torchrun.json" in (out / "network" / "results.txt").read_text()

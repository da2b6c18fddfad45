"""The line at a run's start is taken at its word, and held against the run it began."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mpi_scripts import bench_advice
from mpi_scripts.bench_advice import Held, said, table

LINE = (
    "500,000 values on 2 ranks, links of 95.4 Mbit/s and 127 µs: the dense exchange is expected "
    "to take 1,224 ms a step, and gTop-k (density 0.05) 24.5 ms: compression saves up to 1.2 s; it "
    "pays below about 2 Gbit/s"
)
SCRIPT = Path(bench_advice.__file__)


def held(dense: float, gtopk: float, hosts: int = 2) -> Held:
    return Held("10mbit", hosts, 25_000, LINE, 1.0, 0.9, dense, gtopk)


def test_times_are_read_from_the_line() -> None:
    assert said(LINE, "dense exchange is expected to take") == pytest.approx(1.224)
    assert said(LINE, "saves up to") == 1.2
    with pytest.raises(ValueError, match="must tell a time after 'loses'"):
        said(LINE, "loses")


def test_errors_are_told_of_what_was_measured() -> None:
    rows = table([held(1.0, 0.1), held(1.25, 0.05, 4), held(2.0, 0.2, 8)])
    assert rows[2] == "| dense's time | 3 | 20 % | 2 | -50 % (10mbit, 8 ranks) |"
    assert rows[3] == "| what compression saves | 3 | 25 % | 1 | -50 % (10mbit, 8 ranks) |"


def test_a_network_is_held_against_its_line(tmp_path: Path) -> None:
    network = SCRIPT.with_name("emulated_network.sh")
    if subprocess.run([network, "1", "1gbit", "mpirun", "true"], check=False).returncode:
        pytest.skip("hosts cannot be emulated here")
    done = subprocess.run(
        [sys.executable, SCRIPT, tmp_path, "--rates", "80mbit", "--hosts", "2", "--rounds", "1"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = json.loads((tmp_path / "advice.json").read_text())
    assert "links of" in found["line"]
    assert found["dense_seconds"] > found["gtopk_seconds"] > 0
    assert done.stdout.splitlines()[2].startswith("| dense's time | 1 |")

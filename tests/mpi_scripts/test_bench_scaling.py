"""`bench_scaling.py` starts `python -m mpi_scripts.scaling` on every number of hosts."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mpi_scripts import bench_scaling


def test_command_emulates_hosts_or_passes_the_hostfile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_scaling, "require_mpirun", lambda: Path("/bin/mpirun"))
    file = tmp_path / "one.json"
    options = bench_scaling.parse(["out", "--rate", "10mbit", "--scale", "100", "--", "--rounds=3"])
    words = bench_scaling.command(options, "vgg16", 4, file)
    assert words[1:4] == ["4", "10mbit", "mpirun"]
    assert words[-1] == "--rounds=3"
    assert words[words.index("--bandwidth") + 1] == "1e+07"
    assert words[words.index("--shared-cores") + 1] == str(len(os.sched_getaffinity(0)))
    options = bench_scaling.parse(["out", "--hostfile", "hosts"])
    words = bench_scaling.command(options, "vgg16", 32, file)
    assert words[:5] == ["/bin/mpirun", "-n", "32", "--hostfile", "hosts"]
    assert "--bandwidth" not in words


def test_failed_job_ends_bench_scaling_with_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[list[str]] = []

    def run(words: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        begun.append(words)
        return subprocess.CompletedProcess(words, 77)

    monkeypatch.setattr(bench_scaling.subprocess, "run", run)
    with pytest.raises(SystemExit) as ended:
        bench_scaling.main([str(tmp_path / "out"), "--ranks", "2", "4"])
    assert ended.value.code == 77
    assert len(begun) == 1

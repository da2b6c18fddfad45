"""The job scripts hand train.py and its arguments to a launcher, or say what they need."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from torch.distributed.run import parse_args

JOBS = Path(__file__).parents[2] / "mpi_scripts" / "jobs"
TRAIN = str(JOBS.parent / "train.py")
ARGUMENTS = ["--preset", "lstm-ptb", "--data", "a folder with spaces"]

# A script's launcher, its required arguments, and those that the launcher must get.
SCRIPTS = {
    "openmpi.sh": ("mpirun", ["hosts.txt", "8"], ["-np 8", "--hostfile hosts.txt", "-x PATH"]),
    "slurm.sh": ("srun", [], ["--kill-on-bad-exit=1"]),
    "torchrun.sh": (
        "torchrun",
        ["node1", "2", "4"],
        ["--nnodes=2", "--nproc-per-node=4", "--rdzv-endpoint=node1:29500"],
    ),
    "horovodrun.sh": ("horovodrun", ["node1:4,node2:4", "8"], ["-np 8", "-H node1:4,node2:4"]),
}


def run(script: str, arguments: list[str], folder: Path, **variables: str) -> list[str] | str:
    """Return the launcher's arguments, or the script's message if it does not run it."""
    launcher = folder / SCRIPTS[script][0]
    launcher.write_text('#!/bin/sh\nfor text in "$@"; do printf "%s\\n" "$text"; done\n')
    launcher.chmod(0o755)
    done = subprocess.run(
        [str(JOBS / script), *arguments],
        env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", **variables},
        capture_output=True,
        text=True,
    )
    return done.stderr if done.returncode else done.stdout.splitlines()


def test_every_job_script_passes_arguments_to_its_launcher(tmp_path) -> None:
    assert sorted(path.name for path in JOBS.iterdir()) == sorted(SCRIPTS)
    for script, (_, needed, wanted) in SCRIPTS.items():
        root = str(JOBS.parents[1])
        got = run(script, [*needed, *ARGUMENTS], tmp_path, SLURM_SUBMIT_DIR=root)
        assert isinstance(got, list), got
        assert got[-4:] == ARGUMENTS
        assert got[-5] in (TRAIN, "mpi_scripts/train.py")
        assert [word for word in wanted if word not in " ".join(got)] == []


def test_torchrun_script_keeps_train_arguments_that_look_like_its_own(tmp_path) -> None:
    arguments = ["--log", "a.json", "--", "b"]  # --log is a prefix of several torchrun options
    got = run("torchrun.sh", [*SCRIPTS["torchrun.sh"][1], *arguments], tmp_path)
    assert isinstance(got, list), got
    read = parse_args(got)
    assert [read.training_script, *read.training_script_args] == [TRAIN, *arguments]


def test_job_script_without_required_arguments_prints_usage(tmp_path) -> None:
    for script, (_, needed, _) in SCRIPTS.items():
        output = run(script, needed[:-1], tmp_path, SLURM_SUBMIT_DIR="")
        assert isinstance(output, str), output
        assert "usage: " in output or "submit this script with sbatch" in output


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck here")
def test_shellcheck_finds_nothing() -> None:
    done = subprocess.run(["shellcheck", *map(str, JOBS.iterdir())], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout

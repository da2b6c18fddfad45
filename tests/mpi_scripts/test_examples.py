"""Each example trains on 2 ranks, as it is and as its dense twin."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "mpi_scripts" / "examples"
TOGETHER = {
    "torch": ("images", "nanogpt", "two_sites"),
    "lightning": ("trainer", "fabric"),
    "peft": ("finetune",),
}


@pytest.mark.parametrize("package", TOGETHER)
def test_every_example_learns_with_gtopk_and_with_dense_exchange(forked: Any, package: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make test-adapters")
    job = forked(2, "runs_examples.py", *TOGETHER[package])
    assert job.returncode == 0, job.stdout + job.stderr
    for name in TOGETHER[package]:
        assert job.stdout.count(f"{name} is learned") == 2


@pytest.mark.timeout(900)
def test_torchtitan_replicas_exchange_through_gtopk(torchrun: Any, tmp_path: Path) -> None:
    """Needs more than torchtitan requires: install torchtitan==0.3.0, triton and its own fsspec."""
    if find_spec("torchtitan") is None or find_spec("triton") is None:
        pytest.skip("torchtitan, or triton, is not installed")
    job = torchrun(4, "titan_train.py", str(tmp_path), timeout=600)
    assert job.returncode == 0, job.stdout + job.stderr
    for report in ("all entries make the dense gradient", "it resumes to the bit", "passes add up"):
        assert job.stdout.count(report) == 4, job.stdout + job.stderr


def test_every_example_is_tested_and_listed() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")} - {"__init__", "titan"}
    assert names == {name for each in TOGETHER.values() for name in each}
    names.add("titan")
    listed = (EXAMPLES / "__init__.py").read_text(encoding="utf-8")
    for name in names:
        assert f"    {name}.py " in listed
        assert (EXAMPLES / f"{name}.py").read_text(encoding="utf-8").count("\n") < 100


@pytest.mark.parametrize(
    ("name", "package"),
    [("finetune", "peft"), ("trainer", "lightning"), ("titan", "torchtitan")],
)
def test_example_without_its_package_ends_with_one_line(name: str, package: str) -> None:
    hidden = f"import sys; sys.modules[{package!r}] = None; import mpi_scripts.examples.{name}"
    done = subprocess.run(
        [sys.executable, "-c", hidden],
        cwd=EXAMPLES.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("this example needs ")
    assert done.stderr.count("\n") == 1

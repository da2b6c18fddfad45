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
def test_an_example_learns_and_so_does_its_dense_twin(torchrun: Any, package: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make test-adapters")
    job = torchrun(2, "runs_examples.py", *TOGETHER[package])
    assert job.returncode == 0, job.stdout + job.stderr
    for name in TOGETHER[package]:
        assert job.stdout.count(f"{name} is learned") == 2


def test_every_example_is_run_and_told_of() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")} - {"__init__"}
    assert names == {name for each in TOGETHER.values() for name in each}
    listed = (EXAMPLES / "__init__.py").read_text(encoding="utf-8")
    for name in names:
        assert f"    {name}.py " in listed
        assert (EXAMPLES / f"{name}.py").read_text(encoding="utf-8").count("\n") < 100


@pytest.mark.parametrize(("name", "package"), [("finetune", "peft"), ("trainer", "lightning")])
def test_without_its_package_an_example_ends_with_a_line(name: str, package: str) -> None:
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

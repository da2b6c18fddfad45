"""The whole package: the cost of importing it, and its public names."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import gtopk

ROOT = Path(__file__).parents[2]

FRESH = """
import sys, gtopk
own = {"torch", "lightning", "accelerate", "transformers", "horovod", "mpi4py", "cupy"}
print(*(own | {"tensorboard", "wandb", "mlflow"}) & set(sys.modules))
print(gtopk.ddp.GTopKState.__name__, gtopk.ddp.gtopk_hook.__name__)
sys.modules["lightning"] = None  # not installed
try:
    gtopk.lightning
except ImportError as error:
    print(error)
"""


def test_its_submodules_are_imported_where_they_are_named_and_not_before() -> None:
    job = subprocess.run(
        [sys.executable, "-c", FRESH], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert job.stdout.splitlines() == [
        "",
        "GTopKState gtopk_hook",
        "gtopk.lightning needs Lightning: pip install lightning",
    ]


@pytest.mark.parametrize("name", ["accelerate", "ddp", "horovod", "local_sgd", "torch"])
def test_a_submodule_needs_no_import_of_its_own(name: str) -> None:
    assert gtopk.__getattr__(name) is importlib.import_module(f"gtopk.{name}")


def test_what_it_does_not_have_it_does_not_import() -> None:
    with pytest.raises(AttributeError, match="module 'gtopk' has no attribute 'keras'"):
        gtopk.__getattr__("keras")


@pytest.mark.parametrize("beside", [True, False])
def test_another_package_named_collectives_is_named_in_one_sentence(
    beside: bool, tmp_path: Path
) -> None:
    (tmp_path / "collectives").mkdir()
    (tmp_path / "collectives/__init__.py").write_text("raise ImportError('a placeholder')")
    if beside:  # it lies over ours, whose other files are still there
        (tmp_path / "collectives/vector.py").touch()
    root = Path(__file__).parents[2]
    job = subprocess.run(
        [sys.executable, "-c", "import gtopk"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(root)])},
        capture_output=True,
        text=True,
        check=False,
    )
    *_, said = job.stderr.splitlines()
    assert said.startswith("ImportError: ")
    assert f"{tmp_path / 'collectives'}" in said
    if beside:
        assert "another package named 'collectives' has overwritten" in said
        assert said.endswith("pip uninstall collectives, then install gtopk again")


@pytest.mark.parametrize("command", [["-m", "gtopk"], ["gtopk"]])
def test_a_command_beside_another_collectives_says_the_sentence_alone(
    command: list[str], tmp_path: Path
) -> None:
    (tmp_path / "collectives").mkdir()
    (tmp_path / "collectives/__init__.py").touch()
    # The same as an installed script.
    (tmp_path / "gtopk").write_text("from gtopk.cli import main\n\nraise SystemExit(main())\n")
    folders = os.pathsep.join([str(tmp_path), str(ROOT)])
    job = subprocess.run(
        [sys.executable, *command, "doctor"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": folders},
        capture_output=True,
        text=True,
        check=False,
    )
    assert job.returncode == 1
    assert job.stdout == ""
    (said,) = job.stderr.splitlines()
    assert said.startswith("gtopk: gtopk needs the 'collectives' package it was installed with")
    assert f"{tmp_path / 'collectives'}" in said


def test_dir_shows_what_users_need_and_nothing_else() -> None:
    shown = dir(gtopk)
    assert {"LocalSGD", "save_checkpoint", "load_latest", "ddp", "fsdp", "run"} <= set(shown)
    assert not {"Any", "Path", "TYPE_CHECKING", "importlib", "_HOMES"} & set(shown)

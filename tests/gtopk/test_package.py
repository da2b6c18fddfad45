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


def test_submodules_and_optional_packages_are_imported_at_first_use() -> None:
    job = subprocess.run(
        [sys.executable, "-c", FRESH], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert job.stdout.splitlines() == [
        "",
        "GTopKState gtopk_hook",
        "gtopk.lightning needs Lightning: pip install lightning",
    ]


@pytest.mark.parametrize("name", ["accelerate", "ddp", "horovod", "local_sgd", "torch"])
def test_submodule_is_an_attribute_of_gtopk(name: str) -> None:
    assert gtopk.__getattr__(name) is importlib.import_module(f"gtopk.{name}")


def test_unknown_attribute_raises() -> None:
    with pytest.raises(AttributeError, match="module 'gtopk' has no attribute 'keras'"):
        gtopk.__getattr__("keras")


@pytest.mark.parametrize("overwrites", [True, False])
def test_foreign_collectives_package_raises_with_its_path(overwrites: bool, tmp_path: Path) -> None:
    (tmp_path / "collectives").mkdir()
    (tmp_path / "collectives/__init__.py").write_text("raise ImportError('a placeholder')")
    if overwrites:  # it overwrites ours, whose other files remain
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
    *_, message = job.stderr.splitlines()
    assert message.startswith("ImportError: ")
    assert f"{tmp_path / 'collectives'}" in message
    if overwrites:
        assert "another package named 'collectives' has overwritten" in message
        assert message.endswith("pip uninstall collectives, then install gtopk again")


@pytest.mark.parametrize("command", [["-m", "gtopk"], ["gtopk"]])
def test_command_with_a_foreign_collectives_package_prints_one_line(
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
    (message,) = job.stderr.splitlines()
    assert message.startswith("gtopk: gtopk needs the 'collectives' package it was installed with")
    assert f"{tmp_path / 'collectives'}" in message


def test_dir_lists_public_names_only() -> None:
    shown = dir(gtopk)
    assert {"LocalSGD", "save_checkpoint", "load_latest", "ddp", "fsdp", "run"} <= set(shown)
    assert not {"Any", "Path", "TYPE_CHECKING", "importlib", "_HOMES"} & set(shown)

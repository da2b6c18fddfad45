"""`import horovod` gives gtopk under as_horovod, and only there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gtopk.as_horovod import Finder, install, target_of

ROOT = Path(__file__).parents[3]


@pytest.fixture
def real_horovod(tmp_path: Path) -> Path:
    """A folder with a package horovod that must not be imported."""
    package = tmp_path / "horovod"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('this is the real one')")
    return tmp_path


def test_every_import_path_gives_gtopk_objects_despite_an_installed_horovod(
    real_horovod: Path,
) -> None:
    program = ROOT / "tests/programs/horovod_names.py"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "gtopk.as_horovod", str(program)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(real_horovod), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "every name is gtopk's\n"


def test_finder_is_not_installed_in_this_process() -> None:
    assert not any(isinstance(finder, Finder) for finder in sys.meta_path)


def test_install_raises_if_horovod_is_already_imported(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "horovod", sys)
    with pytest.raises(RuntimeError, match=r"was imported before gtopk\.as_horovod"):
        install()


def test_install_raises_if_transport_is_the_hidden_horovod(monkeypatch) -> None:
    monkeypatch.setenv("GTOPK_TRANSPORT", "horovod")
    with pytest.raises(RuntimeError, match="the real one cannot be imported; unset it"):
        install()


def test_submodules_map_to_submodules_of_the_counterpart() -> None:
    assert target_of("horovod.torch") == "gtopk.torch"
    assert target_of("horovod.torch.mpi_ops") == "gtopk.torch.mpi_ops"
    assert target_of("horovod.common.util") == "gtopk.common.util"
    assert target_of("horovod.runner") == "gtopk.runtime.runner"
    assert target_of("horovod.torch.mpi_ops.deeper") is None
    assert target_of("horovod.torchvision") is None
    assert target_of("horovod.spark") is None


def test_finder_ignores_other_imports() -> None:
    assert Finder().find_spec("json") is None
    assert Finder().find_spec("horovodish") is None

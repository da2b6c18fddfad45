"""The script that builds Horovod lists all missing tools before it begins."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "mpi_scripts" / "build_horovod.sh"


def run(tmp_path: Path, *there: str) -> subprocess.CompletedProcess[str]:
    """Run it with only a few tools, the named ones, and a Python that does nothing."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "dirname", "basename"):
        (tools / name).symlink_to(shutil.which(name))
    for name in (*there, "python"):
        (tools / name).write_text("#!/bin/sh\nexit 1\n")
        (tools / name).chmod(0o755)
    return subprocess.run(
        ["bash", str(SCRIPT), str(tools / "python"), str(tmp_path / "wheels")],
        env={"PATH": str(tools)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_every_missing_tool_is_listed_with_how_to_install_it(tmp_path) -> None:
    done = run(tmp_path)
    assert done.returncode == 1
    first, *rest = done.stderr.splitlines()
    assert first == "build_horovod: missing, and needed to build Horovod:"
    assert [line.split()[0] for line in rest] == ["cmake", "make", "a", "mpicxx", "torch"]
    assert all("install" in line for line in rest)
    assert not (tmp_path / "wheels").exists()


@pytest.mark.parametrize("lacking", ["cmake", "g++"])
def test_only_missing_tools_are_listed(tmp_path, lacking: str) -> None:
    done = run(tmp_path, *{"cmake", "make", "g++", "mpicxx"} - {lacking})
    assert [word in done.stderr for word in ("cmake", "mpicxx")] == [lacking == "cmake", False]
    assert ("C++20 compiler" in done.stderr) == (lacking == "g++")

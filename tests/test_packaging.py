"""What is installed and what is packed is what lies in the folders."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
INSTALLED = ("collectives", "gtopk")
CORE_SOURCES = (".cpp", ".hpp")  # packed, and compiled into what is installed
NEVER_IN_GIT = ("__pycache__", "*.egg-info", "*.so", "build", "dist", "report", ".*")


@pytest.fixture(scope="module")
def setup_cfg() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def files() -> Iterator[Path]:
    """Return the files of the installed packages, relative to the root."""
    for package in INSTALLED:
        for path in (ROOT / package).rglob("*"):
            relative = path.relative_to(ROOT)
            ignored = any(fnmatch(part, word) for part in relative.parts for word in NEVER_IN_GIT)
            if path.is_file() and not ignored:
                yield relative


def package(path: Path) -> str:
    return ".".join(path.parent.parts)


def test_every_folder_with_python_files_is_installed(setup_cfg) -> None:
    listed = setup_cfg["options"]["packages"].split()
    assert listed == sorted({package(path) for path in files() if path.suffix == ".py"})


def test_every_other_file_is_installed_too(setup_cfg) -> None:
    data = setup_cfg["options.package_data"]
    others = [path for path in files() if path.suffix not in (".py", *CORE_SOURCES)]
    assert {path.name for path in others} >= {"py.typed", "page.css"}
    left_out = [
        str(path)
        for path in others
        if not any(fnmatch(path.name, word) for word in data.get(package(path), "").split())
    ]
    assert left_out == []


def wheel(folder: Path, **variables: str) -> zipfile.ZipFile:
    """Return the wheel that the sources make, of a copy that holds nothing built."""
    copy = folder / "copy"
    for name in ("collectives", "gtopk", "setup.py", "setup.cfg", "pyproject.toml", "README.md"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns(*NEVER_IN_GIT))
        else:
            shutil.copy(source, copy / name)
    shutil.copy(ROOT / "LICENSE", copy)
    made = subprocess.run(
        [sys.executable, "setup.py", "-q", "bdist_wheel", "--dist-dir", str(folder)],
        cwd=copy,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler here")
def test_a_wheel_holds_the_compiled_core_and_fits_every_python_of_its_platform(tmp_path) -> None:
    with wheel(tmp_path) as packed:
        assert "collectives/kernels/host/core.so" in packed.namelist()
        assert not any(name.endswith(CORE_SOURCES) for name in packed.namelist())
        name = Path(packed.filename).name
        assert "-py3-none-" in name
        assert not name.endswith("-any.whl")


def test_without_a_compiler_the_package_is_made_all_the_same(tmp_path) -> None:
    with wheel(tmp_path, CC="false", CXX="false") as packed:
        assert "collectives/kernels/__init__.py" in packed.namelist()
        assert not any(name.endswith(".so") for name in packed.namelist())
        assert packed.filename.endswith("-py3-none-any.whl")


def test_the_sources_of_the_core_are_in_the_source_archive() -> None:
    lines = (ROOT / "MANIFEST.in").read_text(encoding="utf-8").splitlines()
    assert "recursive-include collectives/kernels/host *.cpp *.hpp" in lines
    folder = ROOT / "collectives/kernels/host"
    assert {path.suffix for path in folder.iterdir() if path.is_file()} >= {".py", *CORE_SOURCES}


def test_what_the_makefile_runs_is_in_the_source_archive() -> None:
    lines = (ROOT / "MANIFEST.in").read_text(encoding="utf-8").splitlines()
    packed = {word: kind for kind, *words in map(str.split, lines) for word in words}
    for name in ("CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "constraints.txt"):
        assert packed[name] == "include"
        assert (ROOT / name).is_file()
    for name in ("docs", "models", "mpi_scripts", "tests"):
        assert packed[name] == "graft"
        assert (ROOT / name).is_dir()

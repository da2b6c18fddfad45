"""What is installed and what is packed is what lies in the folders."""

from __future__ import annotations

import configparser
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
INSTALLED = ("collectives", "gtopk")
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
    others = [path for path in files() if path.suffix != ".py"]
    assert {path.name for path in others} >= {"py.typed", "page.css"}
    left_out = [
        str(path)
        for path in others
        if not any(fnmatch(path.name, word) for word in data.get(package(path), "").split())
    ]
    assert left_out == []


def test_what_the_makefile_runs_is_in_the_source_archive() -> None:
    lines = (ROOT / "MANIFEST.in").read_text(encoding="utf-8").splitlines()
    packed = {word: kind for kind, *words in map(str.split, lines) for word in words}
    for name in ("CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "constraints.txt"):
        assert packed[name] == "include"
        assert (ROOT / name).is_file()
    for name in ("docs", "models", "mpi_scripts", "tests"):
        assert packed[name] == "graft"
        assert (ROOT / name).is_dir()

"""`make` takes variables from its command line, not from the environment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from configparser import ConfigParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FROM_OUTER_MAKE = ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL")

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def recipe(*words: str, **variables: str) -> str:
    """Return the commands that make would run."""
    environment = {name: text for name, text in os.environ.items() if name not in FROM_OUTER_MAKE}
    make = subprocess.run(
        ["make", "--dry-run", "--always-make", *words],
        cwd=ROOT,
        env=environment | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    return make.stdout


@pytest.mark.parametrize("name", ["VENV", "ARGS", "PYTHON"])
@pytest.mark.parametrize("target", ["test", "demo", "clean", "test-horovod"])
def test_environment_variable_changes_no_recipe(target: str, name: str) -> None:
    assert recipe(target, **{name: "somebody-elses"}) == recipe(target)


def test_command_line_variables_are_used() -> None:
    commands = recipe("test", "VENV=/my/own", "ARGS=--maxfail=1", "PYTHON=python9", ARGS="--co")
    assert "python9 -m venv /my/own\n" in commands
    test = "/my/own/bin/python -m pytest --numprocesses=2 --dist=worksteal --maxfail=1\n"
    assert test in commands
    assert "rm -rf /my/own " in recipe("clean", "VENV=/my/own")


def test_every_target_is_described_at_the_top() -> None:
    text = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    (targets,) = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert set(re.findall(r"^# make ([\w-]+) ", text, re.MULTILINE)) == set(targets.split())


def test_horovod_is_built_for_the_environment_that_tests_it() -> None:
    commands = recipe("test-horovod", "VENV=/my/own", "ARGS=-x").splitlines()
    build = commands.index("mpi_scripts/build_horovod.sh /my/own/bin/python .horovod_cache")
    assert build < commands.index("/my/own/bin/python -m pytest -m horovod -x")
    assert not any(".horovod_cache" in line for line in recipe("clean").splitlines())


def test_every_requirement_that_make_installs_is_pinned() -> None:
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    commands = "".join(map(recipe, ["demo", "test", "test-docs", "test-adapters", "test-mpich"]))
    required = setup["options"]["install_requires"].split()
    for extras in re.findall(r'"\.\[([\w,]+)\]"', commands):
        for extra in extras.split(","):
            required += setup["options.extras_require"][extra].split("\n")
    required += re.findall(r'"(\w+[^"]*>=[^"]*)"', commands)
    names = {re.split(r"[^\w-]", requirement)[0] for requirement in required if requirement}
    assert names >= {"torch", "pytest", "ipykernel", "lightning", "accelerate", "ray", "mpich"}
    pins = re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert names - set(pins) == set()

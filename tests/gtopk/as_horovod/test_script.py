"""A script runs under as_horovod as it does under Python."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.matrix import some_of
from tests.started import STARTED_PATH

ROOT = Path(__file__).parents[3]
TELL = """
import json, os, sys
main = sys.modules["__main__"]
print(json.dumps([
    sys.argv, sys.path[0], __name__, __file__, __package__, __spec__ and __spec__.name,
    main.__dict__ is globals(), type(__loader__).__name__, sorted(set(vars(main)) - {"main"}),
]))
"""
FAIL = """
def fail(deep):
    if deep:
        fail(deep - 1)
    raise ValueError("on purpose")
fail(1)
"""


class Done(NamedTuple):
    code: int
    out: str
    err: str


def python(folder: Path, *words: str) -> Done:
    """Run Python in a folder."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": STARTED_PATH},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    below = tmp_path / "below"
    below.mkdir()
    (below / "__init__.py").touch()
    for name, text in (
        ("tell.py", TELL),
        ("fail.py", FAIL),
        ("torn.py", "x = (\n"),
        ("exit.py", "import sys; sys.exit(7)"),
        ("word.py", "raise SystemExit('a word')"),
    ):
        (below / name).write_text(text)
    (tmp_path / "linked.py").symlink_to(below / "tell.py")
    with zipfile.ZipFile(tmp_path / "packed.zip", "w") as packed:
        packed.writestr("__main__.py", TELL)
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("below/tell.py", "--epochs", "3"), id="script"),
        pytest.param(("linked.py",), id="link"),
        pytest.param(("-m", "below.tell", "-x"), id="module"),
        pytest.param(("packed.zip", "1"), id="archive"),
        pytest.param(("below/exit.py",), id="exit code"),
        pytest.param(("below/word.py",), id="exit text"),
        pytest.param(("below/fail.py",), id="traceback"),
        pytest.param(("-m", "below.fail"), id="traceback of a module"),
        pytest.param(("below/torn.py",), id="syntax error"),
        pytest.param(("-m", "below.absent"), id="no such module"),
        pytest.param(("-m", "below"), id="no main in the package"),
        pytest.param(("below/absent.py",), id="no such file"),
    ],
)
def test_script_behaves_the_same_under_as_horovod_and_python(
    folder: Path, words: tuple[str, ...]
) -> None:
    plain = python(folder, *words)
    as_horovod = python(folder, "-m", "gtopk.as_horovod", *words)
    assert as_horovod == plain
    assert plain.code or plain.out


@pytest.mark.parametrize("words", [(), ("-m",), ("-c", "pass")])
def test_invalid_command_line_prints_the_usage(folder: Path, words: tuple[str, ...]) -> None:
    done = python(folder, "-m", "gtopk.as_horovod", *words)
    assert done.code == 2
    assert "usage: python -m gtopk.as_horovod (SCRIPT | -m MODULE)" in done.err


def test_pickles_are_allowed_unless_environment_forbids_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "ask.py").write_text("import os; print(os.environ['GTOPK_ALLOW_PICKLE'])")
    monkeypatch.delenv("GTOPK_ALLOW_PICKLE", raising=False)
    assert python(folder, "-m", "gtopk.as_horovod", "ask.py").out == "1\n"
    monkeypatch.setenv("GTOPK_ALLOW_PICKLE", "")  # empty counts as not set
    assert python(folder, "-m", "gtopk.as_horovod", "ask.py").out == "1\n"
    monkeypatch.setenv("GTOPK_ALLOW_PICKLE", "0")
    assert python(folder, "-m", "gtopk.as_horovod", "ask.py").out == "0\n"


# The script uses names that the command also has.
SPAWNS = """
import multiprocessing, sys
from horovod.common.util import split_list

settings = json = os = install = follow = None

def report(queue, deep):
    if deep:
        return start(queue, deep - 1)
    queue.put([__name__, sys.argv[1:], split_list([1, 2, 3], 2)])

def start(queue, deep):
    process = multiprocessing.get_context(sys.argv[1]).Process(target=report, args=(queue, deep))
    process.start()
    process.join()
    if process.exitcode:
        sys.exit("a process has failed")

if __name__ == "__main__":
    queue = multiprocessing.get_context(sys.argv[1]).SimpleQueue()
    start(queue, 1)
    print(queue.get())
"""


@pytest.mark.parametrize(
    ("method", "words"),
    some_of(
        itertools.product(["fork", "spawn", "forkserver"], [("spawns.py",), ("-m", "spawns")]),
        ("fork", ("spawns.py",)),
        ("spawn", ("-m", "spawns")),
        ("forkserver", ("spawns.py",)),
    ),
)
def test_child_processes_of_the_script_find_gtopk(
    folder: Path, method: str, words: tuple[str, ...]
) -> None:
    (folder / "spawns.py").write_text(SPAWNS)
    done = python(folder, "-m", "gtopk.as_horovod", *words, method)
    name = "__main__" if method == "fork" else "__mp_main__"
    assert done == (0, f"[{name!r}, [{method!r}], [[1, 2], [3]]]\n", "")


def test_as_horovod_runs_from_a_checkout_without_installation(folder: Path) -> None:
    (folder / "uses.py").write_text("import collectives, sys; print(collectives.__file__)")
    done = subprocess.run(
        [sys.executable, "-m", "gtopk.as_horovod", str(folder / "uses.py")],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(done.stdout.strip()).is_relative_to(ROOT)

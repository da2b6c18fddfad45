"""The command `gtopk`."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys

import pytest

import gtopk
from gtopk.cli import main
from gtopk.cli.completion import parsers
from gtopk.runtime.world import world
from tests.gtopk.made_runs import write_run
from tests.matrix import some_of


def test_version_and_help_are_printed(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"gtopk {gtopk.__version__}\n"
    assert main(["--help"]) == 0
    help_text = capsys.readouterr().out
    assert "demo" in help_text
    assert "doctor" in help_text


@pytest.mark.parametrize("words", [[], ["dmeo"]])
def test_unknown_command_prints_the_usage(capsys, words):
    assert main(words) == 2
    err = capsys.readouterr().err
    assert "usage: gtopk COMMAND" in err
    assert all(word in err for word in words)


def test_python_m_gtopk_runs_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "gtopk", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"gtopk {gtopk.__version__}\n"


def test_every_command_has_an_example_and_all_but_completion_have_json(capsys):
    without_json = set()
    for name, described in parsers().items():
        assert max(map(len, described.description.splitlines())) <= 80, name
        if "--json" not in described.format_help():
            without_json.add(name)
        with pytest.raises(SystemExit):
            main([*name.split(), "--help"])
        assert "\nexample" in capsys.readouterr().out, name
    assert without_json == {"completion"}


def test_help_never_breaks_a_name_at_its_hyphen(monkeypatch):
    for columns in ("60", "80", "100"):
        monkeypatch.setenv("COLUMNS", columns)
        broken = [name for name, p in parsers().items() if re.search(r"\w-\n", p.format_help())]
        assert not broken, columns


PRINTING = [
    ["--help"],
    ["top", "--help"],  # fits the buffer, so argparse sees no error
    ["plan", "--model", "resnet50", "--ranks", "4", "--bandwidth", "1gbit", "--no-measure"],
    ["top", "made"],
    ["top", "made", "--json"],
]


def printed_to(stdout, folder, words, unbuffered=""):
    """Return the command's exit code and stderr; stdout: a file, a pipe's end, None: closed."""
    variables = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": unbuffered}
    write_run(folder / "made", ranks=1, steps=2)
    closing = ["sh", "-c", 'exec "$@" >&-', "sh"] if stdout is None else []
    done = subprocess.run(
        [*closing, sys.executable, "-m", "gtopk", *words],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, **variables},
    )
    return done.returncode, done.stderr


PLAN = ["plan", "--model=resnet20", "--ranks=4", "--bandwidth=10gbit"]


@pytest.mark.parametrize(
    ("encoding", "words"),
    [
        *((encoding, PLAN) for encoding in ("gbk", "koi8-r", "euc-jp", "ascii")),
        ("ascii", ["doctor", "--no-run"]),  # the smallest encoding
    ],
)
def test_command_prints_in_any_encoding(encoding, words):
    done = subprocess.run(
        [sys.executable, "-m", "gtopk", *words],
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"},
    )
    assert b"Error" not in done.stderr, done.stderr
    out = done.stdout.decode(encoding)
    if words[0] == "plan":
        assert done.returncode == 0, done.stderr
        assert " us" in out  # microseconds
        assert "\\x" not in out
        assert "\\u" not in out


@pytest.mark.parametrize("words", some_of(PRINTING, PRINTING[0]), ids=" ".join)
def test_closed_pipe_ends_a_command_silently(tmp_path, words):
    reads, writes = os.pipe()
    os.close(reads)
    try:
        assert printed_to(writes, tmp_path, words) == (141, "")
    finally:
        os.close(writes)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_full_stdout_prints_one_error_line(tmp_path, unbuffered):
    with open("/dev/full", "w") as full:
        code, err = printed_to(full, tmp_path, PRINTING[2], unbuffered)
    assert (code, err) == (1, "gtopk: stdout cannot be written: No space left on device\n")


@pytest.mark.parametrize("words", some_of(PRINTING, PRINTING[1]), ids=" ".join)
def test_closed_stdout_prints_one_error_line(tmp_path, words):
    err = "gtopk: stdout cannot be written: Bad file descriptor\n"
    assert printed_to(None, tmp_path, words) == (1, err)


def test_closed_stderr_sends_no_message_to_stdout():
    code = (
        "from collectives.transports.transport import print_line; from gtopk.cli import main; "
        "print_line('news'); main(['run']); main(['plan'])"
    )
    command = ["sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "-c", code]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")


def raises(error):
    def anything(*arguments):
        raise error

    return anything


def test_ctrl_c_during_import_ends_a_command_silently(monkeypatch, capsys):
    monkeypatch.setattr(importlib, "import_module", raises(KeyboardInterrupt()))
    assert main(["plan"]) == 130
    assert capsys.readouterr().err == ""


def test_broken_pipe_not_of_stdout_is_raised(monkeypatch):
    monkeypatch.setattr("gtopk.cli.plan.main", raises(BrokenPipeError("a peer's")))
    with pytest.raises(BrokenPipeError, match="a peer's"):
        main(["plan"])


@pytest.mark.parametrize("error", [KeyboardInterrupt, BrokenPipeError])
def test_interrupt_or_broken_pipe_within_a_world_is_raised(monkeypatch, threads, error):
    monkeypatch.setattr("gtopk.cli.plan.main", raises(error()))

    def rank(transport):
        with world.entered(transport), pytest.raises(error):
            main(["plan"])

    threads(2, rank)

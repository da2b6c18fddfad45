"""`gtopk run` prints its command in a dry run, and returns the ranks' exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gtopk.cli import run as command
from gtopk.cli.run import main
from gtopk.runtime.launch import Mpi
from gtopk.runtime.runner import ranks
from tests.started import STARTED_PATH

PLENTY_SECONDS = 100.0
# `gtopk run` with a fake mpirun that becomes the only rank, without `job`'s own waiting time.
RUN = """
import pathlib, sys
from gtopk.runtime.launch import job
from gtopk.cli import run as command
from gtopk.runtime.runner import ranks
job._GRACE_SECONDS = 0.0
ranks.require_mpirun = lambda: pathlib.Path(sys.argv[1])
sys.exit(command.main(["-n", "1", "--launcher", "mpirun", *sys.argv[2:]]))
"""
# A rank that, on SIGTERM, saves until the test lets it continue.
SAVING = """
import pathlib, signal, sys, time

def until(name):
    while not pathlib.Path(name).exists():
        time.sleep(0.01)

def save(*of_signal):
    pathlib.Path("saving").touch()
    until("go on")
    pathlib.Path("saved").touch()
    sys.exit(143)

signal.signal(signal.SIGTERM, save)
pathlib.Path("begun").touch()
until("never")
"""


def dry_run(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert main(["--dry-run", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text("")
    return str(tmp_path / "train.py")


def test_each_launcher_gets_the_script_and_its_arguments(capsys, script: str, monkeypatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name, **_: f"/bin/{name}")
    for launcher, word in (
        ("mpirun", "-n"),
        ("torchrun", "--nproc-per-node=3"),
        ("srun", "--ntasks=3"),
    ):
        found = dry_run(capsys, "-n", "3", "--launcher", launcher, script, "--lr", "1", "-n", "9")
        assert found["launcher"] == launcher
        assert word in found["command"]
        assert found["command"][-6:] == [sys.executable, script, "--lr", "1", "-n", "9"]


def test_options_may_be_horovodruns(capsys, script: str) -> None:
    found = dry_run(capsys, "-np", "3", "-H", "one:2,two:1", script)
    assert found == dry_run(capsys, "--ranks", "3", "--hosts", "one:2,two:1", script)
    assert found["ranks"] == 3


@pytest.mark.parametrize(
    "arguments",
    [
        ["--", "b"],
        ["--host", "0.0.0.0"],  # a prefix of --hosts and --hostfile
        ["--r", "3", "--json", "-n", "9"],
    ],
)
def test_words_after_the_script_are_its_arguments(
    capsys, script: str, arguments: list[str]
) -> None:
    for launcher in ("mpirun", "torchrun"):
        for words in ([script], ["--", script]):
            options = ["-n", "2", "--launcher", launcher]
            found = dry_run(capsys, *options, *words, *arguments)
            assert found["ranks"] == 2
            assert found["command"][-len(arguments) - 2 :] == [sys.executable, script, *arguments]


@pytest.fixture
def in_slurm(tmp_path: Path, monkeypatch) -> pytest.MonkeyPatch:
    """A Slurm allocation of 8 tasks on hosts with 2 cores, and an srun on PATH."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "srun").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    monkeypatch.setattr(command, "usable_cores", lambda: 2)
    return monkeypatch


def test_srun_starts_the_tasks_of_an_allocation_by_default(capsys, script: str, in_slurm) -> None:
    found = dry_run(capsys, script)
    assert (found["launcher"], found["ranks"]) == ("srun", 8)
    assert found["command"][:2] == ["srun", "--ntasks=8"]
    assert dry_run(capsys, "-n", "3", script)["command"][1] == "--ntasks=3"
    assert dry_run(capsys, "--launcher", "torchrun", script)["ranks"] == 2
    assert dry_run(capsys, "--hosts", "localhost:3", script)["ranks"] == 3
    in_slurm.delenv("SLURM_NTASKS")
    assert dry_run(capsys, script)["ranks"] == 2
    in_slurm.setenv("SLURM_JOB_ID", "")
    assert dry_run(capsys, script)["launcher"] != "srun"


def test_allocation_without_tasks_gets_ranks_by_the_cores_of_its_nodes(
    capsys, script: str, in_slurm
) -> None:
    in_slurm.delenv("SLURM_NTASKS")
    in_slurm.setenv("SLURM_JOB_CPUS_PER_NODE", "16(x2),9")
    assert dry_run(capsys, script)["ranks"] == 41
    in_slurm.setenv("SLURM_CPUS_PER_TASK", "4")
    assert dry_run(capsys, script)["ranks"] == 4 + 4 + 2


@pytest.mark.parametrize("words", [[], ["-n", "3"]])
def test_srun_passes_on_the_cores_per_task_of_the_allocation(
    capsys, script: str, in_slurm, words: list[str]
) -> None:
    assert not any("cpus" in word for word in dry_run(capsys, *words, script)["command"])
    in_slurm.setenv("SLURM_CPUS_PER_TASK", "4")
    assert dry_run(capsys, *words, script)["command"][2] == "--cpus-per-task=4"


def test_cores_per_task_apply_only_if_each_node_has_one_rank(capsys, script: str, in_slurm) -> None:
    in_slurm.delenv("SLURM_NTASKS")
    in_slurm.setenv("SLURM_JOB_NUM_NODES", "4")
    in_slurm.setenv("SLURM_CPUS_PER_TASK", "8")
    assert dry_run(capsys, "-n", "4", script)["command"][2] == "--cpus-per-task=8"
    assert not any("cpus" in word for word in dry_run(capsys, "-n", "5", script)["command"])


@pytest.mark.parametrize(("tasks", "words"), [(None, []), ("1", ["-n", "4"])])
def test_ranks_beyond_the_tasks_of_the_allocation_share_its_cores(
    capsys, script: str, in_slurm, tasks: str | None, words: list[str]
) -> None:
    in_slurm.setenv("SLURM_CPUS_PER_TASK", "8")
    if tasks is None:
        in_slurm.delenv("SLURM_NTASKS")
    else:
        in_slurm.setenv("SLURM_NTASKS", tasks)
    assert not any("cpus" in word for word in dry_run(capsys, *words, script)["command"])


@pytest.mark.parametrize("name", ["SLURM_NTASKS", "SLURM_CPUS_PER_TASK"])
def test_slurm_variable_without_a_number_is_an_error(
    capsys, script: str, in_slurm, name: str
) -> None:
    in_slurm.setenv(name, "4(x2)")
    assert main(["--dry-run", script]) == 2
    assert f"{name} must be a whole number, at least 1, got '4(x2)'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["tr", "as_no_program_on_path"])
def test_executable_file_here_precedes_a_program_on_path(
    capsys, tmp_path: Path, monkeypatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).touch(mode=0o755)
    for given, started in ((name, f"./{name}"), (f"{tmp_path}/{name}", f"{tmp_path}/{name}")):
        assert dry_run(capsys, "-n", "2", given, "-d", "x")["command"][-3:] == [started, "-d", "x"]


def test_record_and_timeline_options_set_environment_variables(capsys, script: str) -> None:
    found = dry_run(capsys, "-n", "2", "--record", "runs/a", "--timeline", "traces", "-m", "pkg")
    assert found["variables"]["GTOPK_RUN"] == str(Path("runs/a").absolute())
    assert found["variables"]["GTOPK_TIMELINE"] == str(Path("traces").absolute())
    assert found["command"][-3:] == [sys.executable, "-m", "pkg"]


def test_hosts_option_sets_the_number_of_ranks(capsys, script: str) -> None:
    found = dry_run(capsys, "--hosts", "localhost:3", script)
    assert found["ranks"] == 3


@pytest.mark.parametrize("cores", [1, 64])
def test_core_settings_of_this_host_are_not_sent_to_other_hosts(
    capsys, script: str, monkeypatch, cores: int
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("collectives.cores.usable_cores", lambda: cores)
    monkeypatch.setattr(ranks, "require_mpirun", lambda: Path("mpirun"))
    monkeypatch.setattr(ranks, "identify", lambda path: Mpi(path, "Open MPI", "5.0"))
    found = dry_run(capsys, "--launcher", "mpirun", "--hosts", "10.9.9.9:2,10.9.9.8:2", script)
    assert (
        found["variables"]
        .keys()
        .isdisjoint(
            {"OMP_NUM_THREADS", "OMPI_MCA_rmaps_base_oversubscribe", "OMPI_MCA_mpi_yield_when_idle"}
        )
    )
    assert "OMP_NUM_THREADS" not in found["command"]
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    found = dry_run(capsys, "--launcher", "mpirun", "--hosts", "10.9.9.9:2,10.9.9.8:2", script)
    assert "OMP_NUM_THREADS" in found["command"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["no_such_script.py"], "SCRIPT must be a file or a program, and 'no_such_script.py' is"),
        (["-n", "2"], "SCRIPT is missing: give a file or a program"),
        (["-n", "4", "--hosts", "localhost:2", "true"], "4 ranks need 4 slots"),
        (["--hostfile", "/dev/null/x", "true"], "run: --hostfile /dev/null/x: Not a directory"),
    ],
)
def test_command_that_cannot_start_says_why(capsys, words: list[str], text: str) -> None:
    assert main(words) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "error"),
    [
        *((text, "must be a whole number, at least 1") for text in ("0", "-1", "", "1e3", "1,000")),
        ("9" * 20, "must have at most 15 digits"),
    ],
)
def test_number_of_ranks_that_is_none_is_refused(capsys, text: str, error: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([f"--ranks={text}", "true"])
    assert f"argument -n/-np/--ranks: {error}, got {text!r}" in capsys.readouterr().err


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PLENTY_SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def running(tmp_path: Path):
    """A `gtopk run` with a started rank."""
    launcher = tmp_path / "mpirun"
    launcher.write_text('#!/bin/sh\nshift 2\nexec "$@"\n')
    launcher.chmod(0o755)
    (tmp_path / "saving.py").write_text(SAVING)
    with subprocess.Popen(
        [sys.executable, "-c", RUN, str(launcher), "saving.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": STARTED_PATH},
        stderr=subprocess.PIPE,
    ) as started:
        wait_until((tmp_path / "begun").exists)
        yield started
        started.kill()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_ranks_have_time_to_save_after_preemption(running, tmp_path, number, code) -> None:
    running.send_signal(number)
    wait_until((tmp_path / "saving").exists)
    assert running.poll() is None
    (tmp_path / "go on").touch()
    assert running.wait(PLENTY_SECONDS) == code
    assert (tmp_path / "saved").exists()


def test_second_signal_ends_ranks_immediately(running, tmp_path) -> None:
    running.send_signal(signal.SIGINT)
    wait_until((tmp_path / "saving").exists)
    running.send_signal(signal.SIGINT)
    assert running.wait(PLENTY_SECONDS) == 130
    assert not (tmp_path / "saved").exists()


def test_link_option_reaches_the_ranks(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = dry_run(capsys, "-n", "2", "--launcher", "torchrun", "--link", "100mbit,0.4ms", script)
    assert found["variables"]["GTOPK_LINK"] == "100mbit,0.4ms"
    assert (
        "GTOPK_LINK"
        not in dry_run(capsys, "-n", "2", "--launcher", "torchrun", script)["variables"]
    )


def test_invalid_link_is_an_error_with_the_valid_form(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--link", "fast", script])
    assert "--link: must be a rate above 0" in capsys.readouterr().err


def test_link_option_with_other_hosts_is_an_error(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--hosts", "elsewhere.invalid:2", "--launcher", "mpirun", "--link", "1gbit", script]
    assert main(words) == 2
    assert "'elsewhere.invalid' is another host" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (["sh", "-c", "exit 7"], "gtopk run: a rank ended with exit code 7\n"),
        (["sh", "-c", "kill -9 $$"], "exit code 137 (SIGKILL)\n"),
    ],
)
def test_run_prints_the_exit_code_of_a_failed_rank(
    capsys, program: list[str], message: str
) -> None:
    assert main(["--launcher", "mpirun", "-n", "2", *program])
    assert message in capsys.readouterr().err

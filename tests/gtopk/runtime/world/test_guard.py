"""However one rank of a real MPI job ends, all end without hanging, and report the reason."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from collectives.transports import local_world
from gtopk.runtime.world import world
from gtopk.runtime.world.guard import Guard
from tests.matrix import some_of
from tests.started import finished

# How rank 2 of 3 ends at step 5 -> text that must appear besides "step 5". A signal is reported by
# mpirun, by a survivor (mpirun may learn of its end first), or by a survivor's companion.
ENDINGS = {
    "exception": r"rank 2 of 3 .* failed at step 5: RuntimeError: boom",
    "exception with a live thread": r"rank 2 of 3 .* failed at step 5: RuntimeError: boom",
    "exception in a thread": r"rank 2 of 3 .* failed at step 5: ZeroDivisionError",
    "exit 0": r"rank 2 left \(its program ended at step 5; host .*, pid \d+\)",
    "exit 3": r"rank 2 left \(its program ended at step 5",
    "exit 0 with a live thread": r"rank 2 left \(its program ended at step 5",
    "early return": r"rank 2 left \(its program ended at step 5",
    "shutdown": r"rank 2 left \(called shutdown\(\) at step 5",
    "os._exit": r"rank 2 (.*\n?.*exit|is lost \()",
    "killed": r"rank 2 (with PID \d+ .*\n?.*signal 9|is lost \()",
    "segfault": r"rank 2 (with PID \d+ .*\n?.*signal 11|is lost \()",
}


def runs(pid: str) -> bool:
    """Tell whether a process runs; a zombie (Z) does not."""
    try:
        return Path("/proc", pid, "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def assert_none_runs(pids: list[str]) -> None:
    """Wait for them: MPICH's mpirun does not wait for processes that it has killed."""
    deadline = time.monotonic() + 2
    while running := [pid for pid in pids if runs(pid)]:
        assert time.monotonic() < deadline, running
        time.sleep(0.01)


@pytest.mark.parametrize("ending", some_of(ENDINGS, "exception", "killed", "shutdown"))
def test_mpirun_job_ends_and_names_rank_and_step(mpirun, ending):
    job = mpirun(3, "ends.py", ending, "2", timeout=60)
    assert re.search(ENDINGS[ending], job.stderr), job.stderr
    assert_all_have_ended(job)


def assert_all_have_ended(job):
    assert job.returncode != 0
    assert "at step 5" in job.stderr, job.stderr
    ended = re.findall(r"pid (\d+)", job.stdout)
    assert len(ended) == 3
    assert_none_runs(ended)
    reached = [float(at) for at in re.findall(r"ending at ([\d.]+)", job.stdout)]
    assert len(reached) == 1
    assert time.time() - reached[0] < 10, "the promise is 10 s"


UNDER_TORCHRUN = {
    **{
        ending: ENDINGS[ending]
        for ending in (
            "exception",
            "exit 0",
            "exit 3",
            "exception with a live thread",
            "early return",
        )
    },
    "killed": r"rank +: 2 .*\n +exitcode +: -9",
    "segfault": r"rank +: 2 .*\n +exitcode +: -11",
}


@pytest.mark.parametrize("ending", some_of(UNDER_TORCHRUN, "killed"))
def test_torchrun_job_ends_and_names_rank_and_step(torchrun, ending):
    job = torchrun(3, "ends.py", ending, "2", timeout=60)
    assert re.search(UNDER_TORCHRUN[ending], job.stderr), job.stderr
    assert_all_have_ended(job)


def test_job_ends_and_names_rank_0_when_it_exits_early(mpirun):
    job = mpirun(2, "ends.py", "exit 0", "0", timeout=60)
    assert job.returncode != 0
    assert "rank 0 left (its program ended at step 5" in job.stderr


def test_job_ends_only_after_a_slow_rank_has_printed_its_error(mpirun):
    """Although its operation has failed, and the others know that it leaves."""
    job = mpirun(3, "ends.py", "exception, and a rank is slow to speak", "2", timeout=60)
    assert job.returncode != 0
    for rank in (0, 1):
        assert re.search(rf"rank {rank} of 3 .* failed at step 5: .*rank 2 left", job.stderr)


def test_sigterm_does_not_cut_off_the_error_that_a_rank_prints(mpirun, tmp_path):
    """torchrun sends it when it sees that another rank is lost."""
    ending = "exception, and SIGTERM in mid-sentence"
    job = mpirun(2, "ends.py", ending, "1", timeout=60, GTOPK_FAILURE_DIR=str(tmp_path))
    assert job.returncode != 0
    line = r"rank 1 of 2 .* failed at step 5: RuntimeError: boom; ending the job"
    assert len(re.findall(line, job.stderr)) == 1, job.stderr
    assert "rank 1 of 2" not in re.sub(line, "", job.stderr), job.stderr
    assert (tmp_path / "failure_rank1.json").exists()


def test_second_sigterm_while_the_first_is_announced_is_not_announced(mpirun):
    job = mpirun(2, "ends.py", "SIGTERM, and again while it is announced", "1", timeout=60)
    assert job.returncode != 0
    line = r"rank 1 of 2 .* was stopped by SIGTERM at step 5"
    assert len(re.findall(line, job.stderr)) == 1, job.stderr


@pytest.mark.parametrize("launcher", some_of(["mpirun", "torchrun"], "mpirun"))
def test_job_that_ends_well_prints_nothing_and_writes_no_failure_file(request, launcher, tmp_path):
    start = request.getfixturevalue(launcher)
    job = start(2, "ends.py", "well", "2", timeout=60, GTOPK_FAILURE_DIR=str(tmp_path))
    assert job.returncode == 0
    assert job.stderr == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_error_names_a_rank_that_ends_before_init(request, launcher, tmp_path):
    start = request.getfixturevalue(launcher)
    job = start(2, "never_arrives.py", timeout=60, GTOPK_FAILURE_DIR=str(tmp_path))
    assert job.returncode != 0
    error = r"rank 0 of 2 \(.*\) cannot join the others: .* rank 1 has ended before hvd.init"
    assert re.search(f"gtopk: {error}", job.stderr), job.stderr
    written = json.loads((tmp_path / "failure_rank0.json").read_text())
    assert re.match(error, written["text"])
    assert (written["rank"], written["size"], written["operation"]) == (0, 2, "init")


def test_start_timeout_ends_mpis_wait_for_a_rank_that_does_not_init(mpirun):
    job = mpirun(2, "never_arrives.py", "alive", timeout=60, GTOPK_START_TIMEOUT="1")
    assert job.returncode != 0
    error = r"gtopk: rank 0 of 2 has waited 1 s \(GTOPK_START_TIMEOUT\) in MPI's start"
    assert re.search(error, job.stderr), job.stderr


def test_start_timeout_ends_the_wait_for_a_missing_rank_under_torchrun(torchrun):
    job = torchrun(2, "never_arrives.py", "alive", timeout=60, GTOPK_START_TIMEOUT="2")
    assert job.returncode != 0
    error = r"PeerTimeoutError: rank 0 of 2 has waited 2(\.\d+)? s at the start for rank 1: "
    assert re.search(error, job.stderr), job.stderr


def test_operation_that_fails_on_one_rank_fails_on_all(mpirun):
    """Continuing would pair messages of different steps, and sums would be silently wrong."""
    job = mpirun(2, "fails.py", "an operation fails and the script goes on", timeout=60)
    assert re.search(
        r"rank 0: rank 1 left \(failed in gradients\..*: RuntimeError: out of memory "
        r"at step 0; host",
        job.stdout,
    ), job.stdout
    assert "rank 1: out of memory" in job.stdout
    assert "AssertionError" not in job.stderr


def test_exception_that_passes_a_finally_with_shutdown_ends_job_at_once(mpirun):
    begun = time.time()
    job = mpirun(2, "fails.py", "an exception passes a finally", timeout=50)
    assert job.returncode != 0
    assert "rank 1 of 2" in job.stderr
    assert "failed at step 0: ValueError: boom" in job.stderr
    assert time.time() - begun < 40, "rank 0 would have slept for 60 s"


@pytest.fixture(scope="module")
def handling_job(mpirun, tmp_path_factory):
    """Return the output of a job that handles several exceptions without ending."""
    cases = (
        "one before init",
        "one that ended the loop",
        "one that holds much",
        "one of long ago",
    )
    return mpirun(2, "handles.py", str(tmp_path_factory.mktemp("handled")), *cases, timeout=60)


@pytest.mark.parametrize("case", ["one before init", "one that ended the loop"])
def test_handled_exception_does_not_end_the_job_at_shutdown(handling_job, case):
    assert handling_job.returncode == 0, handling_job.stderr
    assert handling_job.stdout.splitlines().count(f"well after {case}") == 2
    assert handling_job.stderr.startswith("Exception in thread of the script's own")


def test_exception_after_all_ranks_left_does_not_end_the_job(handling_job):
    assert handling_job.returncode == 0, handling_job.stderr
    assert handling_job.stdout.splitlines().count("well after one of long ago") == 2
    assert handling_job.stderr.count("IndexError") == 2
    assert "ending the job" not in handling_job.stderr


def test_exception_handled_at_init_is_released_with_its_frames(handling_job):
    assert handling_job.returncode == 0, handling_job.stderr
    assert handling_job.stdout.splitlines().count("well after one that holds much") == 2


def test_waiting_rank_learns_the_exception_handled_by_a_rank_that_left(mpirun, tmp_path):
    job = mpirun(2, "handles.py", str(tmp_path), "one while the other waits", timeout=60)
    assert job.returncode == 0, job.stderr
    left = r"rank 0: rank 1 left \(called shutdown\(\) while it handled ValueError: boom at step 0"
    assert re.search(left, job.stdout), job.stdout
    assert job.stdout.count("well") == 2


@pytest.mark.parametrize(
    ("variable", "error"),
    [
        ("GTOPK_TIMEOUT", r"has waited 3(\.\d+)? s for rank 1 in barrier.* larger GTOPK_TIMEOUT"),
        ("GTOPK_HEARTBEAT_TIMEOUT", r"rank 1 is lost \(stopped for 3\.\d s"),
    ],
)
def test_frozen_rank_is_named_when_the_standard_streams_are_closed(mpirun, variable, error):
    """With open streams: tests/faults/test_frozen.py."""
    job = mpirun(
        2, "fails.py", "a peer is frozen", "without streams", timeout=60, **{variable: "3"}
    )
    assert job.returncode != 0
    assert re.search(error, job.stderr), job.stderr
    assert "companion was ended" not in job.stderr
    assert "NoneType" not in job.stderr
    (frozen,) = re.findall(r"frozen (\d+)", job.stderr)
    assert_none_runs([frozen])


# "own store": no agent serves the store, as when RANK, WORLD_SIZE and MASTER_PORT are set by hand;
# for forked ranks an agent does, as with torchrun.
@pytest.mark.parametrize("launcher", some_of(["mpirun", "forked", "own store"], "forked"))
def test_init_works_after_an_init_in_which_the_ranks_disagreed(launcher, request):
    own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if launcher == "own store" else {}
    start = request.getfixturevalue("torchrun" if own else launcher)
    job = start(2, "inits_again.py", timeout=60, **own)
    assert job.returncode == 0, job.stderr
    assert job.stdout.splitlines() == ["well"] * 2
    assert job.stderr == ""


@pytest.mark.parametrize("launcher", some_of(["mpirun", "torchrun"], "mpirun"))
def test_process_that_a_rank_has_started_is_no_rank(launcher, request):
    job = request.getfixturevalue(launcher)(2, "forks.py", timeout=60)
    assert job.returncode == 0, job.stderr
    assert "gtopk" not in job.stderr


def test_guard_prints_its_line_when_stdout_cannot_be_flushed(monkeypatch, capfd):
    """Within a print of the main thread, a SIGTERM handler would wait for the stream's lock."""
    released = threading.Event()
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(flush=released.wait))
    guard = object.__new__(Guard)
    guard.name, guard.place = "rank 1 of 2", "host one, pid 7"
    guard._print("was stopped by SIGTERM")
    released.set()
    monkeypatch.undo()
    assert "rank 1 of 2 (host one, pid 7) was stopped by SIGTERM" in capfd.readouterr().err


def test_rank_ends_when_nobody_reads_its_stderr(unread_stderr):
    guard = object.__new__(Guard)
    guard.name, guard.place = "rank 1 of 2", "host one, pid 7"
    assert unread_stderr(lambda: guard._print("ends the job"))


def test_thread_exception_ends_the_job_only_until_the_rank_leaves():
    """Daemon threads that communicate in a loop fail when the program ends."""
    with world.entered(local_world(1)[0]) as here:
        guard = object.__new__(Guard)
        guard.world = here
        failed: list[BaseException] = []
        vars(guard).update(_threading_excepthook=print, _fail=failed.append)
        errors = [RuntimeError("while it trains"), RuntimeError("once it leaves")]
        for error in errors:
            guard._on_thread_exception(threading.ExceptHookArgs([type(error), error, None, None]))
            here.leave("its program ended")
    assert failed == errors[:1]


def test_sigterm_handler_of_a_retired_guard_calls_the_present_one(monkeypatch):
    """`termination` restores it after a recovery within its block."""
    left, present = (object.__new__(Guard) for _ in range(2))
    left._retired, present._retired = True, False
    signals: list[Any] = []
    monkeypatch.setattr(Guard, "_installed", present)
    monkeypatch.setattr(
        present, "_on_sigterm", lambda *signal: signals.append(signal), raising=False
    )
    left._on_sigterm(15, None)
    assert signals == [(15, None)]


def test_guard_can_be_removed_from_a_thread_other_than_the_main_one():
    """`shutdown` may be called there; the handler stays, and acts as the default one."""
    world = SimpleNamespace(
        transport=SimpleNamespace(name="mpi", rank=0, size=2), engine=SimpleNamespace(), step=0
    )
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        guard = Guard(world)
        guard.install()
        with ThreadPoolExecutor() as thread:
            thread.submit(guard.remove).result()
        assert threading.excepthook is not guard._on_thread_exception
        guard.remove()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_sigterm_waits_for_every_thread_that_prints_an_error(monkeypatch):
    guard = object.__new__(Guard)
    guard._reporting, guard._sigterm_pending = set(), False
    sent: list[Any] = []
    monkeypatch.setattr(os, "kill", lambda *signal: sent.append(signal))

    def report() -> None:
        with guard._delay_sigterm():
            guard._sigterm_pending = True

    other = threading.Thread(target=report)
    with guard._delay_sigterm():
        other.start()
        other.join()
        assert sent == []
    assert sent == [(os.getpid(), signal.SIGTERM)]


def test_rank_whose_init_fails_after_joining_is_not_waited_for(forked, tmp_path):
    job = forked(2, "init_fails_on_one.py", GTOPK_TIMEOUT="300", GTOPK_FAILURE_DIR=str(tmp_path))
    output = job.stdout + job.stderr
    assert "rank 1: ValueError: GTOPK_HEARTBEAT_TIMEOUT" in output
    assert re.search(r"rank 0: \w+: .*rank 1 left \(its init\(\) failed", output)
    (failure,) = tmp_path.glob("*rank1*.json")
    assert "GTOPK_HEARTBEAT_TIMEOUT" in failure.read_text()


def test_ranks_that_multiprocessing_has_forked_leave_in_order(tmp_path):
    program = Path(__file__).parents[3] / "programs" / "spawned.py"
    job = finished([sys.executable, str(program), str(tmp_path / "store"), "fork"], 120, {})
    assert job.returncode == 0, job.stderr
    assert "lost" not in job.stderr
    assert "ended without an error message" not in job.stderr


def test_an_exception_in_a_rank_that_multiprocessing_has_started_is_named(tmp_path):
    program = Path(__file__).parents[3] / "programs" / "spawned.py"
    job = finished([sys.executable, str(program), str(tmp_path / "store"), "spawn"], 120, {})
    assert job.returncode != 0
    assert "rank 1 of 2" in job.stderr
    assert re.search(r"failed at step 2: KeyError: 'no such word'", job.stderr), job.stderr

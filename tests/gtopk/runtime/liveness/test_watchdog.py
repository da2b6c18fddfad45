"""The watchdog ends a start that would wait forever."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest

from gtopk.runtime.liveness import watchdog
from gtopk.runtime.liveness.watchdog import Process, Siblings, WatchdogSettings, deadline


@pytest.mark.parametrize("holds_lock", [False, True])
def test_body_that_ends_in_time_is_left_alone_and_its_watchdog_killed(
    capfd, monkeypatch, holds_lock
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Popen(subprocess.Popen):
        def __init__(self, *arguments, **options) -> None:
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    with deadline(WatchdogSettings(60, "late"), holds_lock=holds_lock):
        pass
    assert [each.returncode for each in started] == [-signal.SIGKILL] * holds_lock
    assert capfd.readouterr().err == ""


def test_body_that_ends_during_a_slow_check_is_left_alone(monkeypatch, capfd) -> None:
    """A thread checks; killing now would kill a process that has joined in the meantime."""
    waits = iter([False, True, True])
    monkeypatch.setattr(os, "kill", None)
    watchdog.watch(WatchdogSettings(0.0, "late"), os.getpid(), lambda seconds: next(waits))
    assert next(waits, None) is None
    assert capfd.readouterr().err == ""


def test_body_that_hangs_holding_the_gil_is_ended_with_a_message() -> None:
    program = (
        "import ctypes\n"
        "from gtopk.runtime.liveness.watchdog import WatchdogSettings, deadline\n"
        "with deadline(WatchdogSettings(0.2, 'rank 1 is late')):\n"
        "    ctypes.PyDLL(None).sleep(60)  # PyDLL: keeps Python's lock\n"
    )
    child = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False
    )
    assert child.returncode == -9
    assert child.stderr == "gtopk: rank 1 is late\n"


@pytest.mark.parametrize("holds_lock", [False, True])
def test_body_that_hangs_is_ended_when_nobody_reads_stderr(unread_stderr, holds_lock) -> None:
    program = (
        "import time\n"
        "from gtopk.runtime.liveness.watchdog import WatchdogSettings, deadline\n"
        f"with deadline(WatchdogSettings(0.2, 'rank 1 is late'), holds_lock={holds_lock}):\n"
        "    time.sleep(60)\n"
    )
    child = [sys.executable, "-c", program]
    ended: list[int] = []
    assert unread_stderr(lambda: ended.append(subprocess.run(child, check=False).returncode))
    assert ended == [-9]


def test_body_whose_launcher_is_killed_is_ended_with_a_message(tmp_path) -> None:
    (tmp_path / "rank.py").write_text(
        "import ctypes, math, os\n"
        "from gtopk.runtime.launch.job import launcher\n"
        "from gtopk.runtime.liveness.watchdog import WatchdogSettings, deadline\n"
        "with deadline(WatchdogSettings(math.inf, '', launcher(), 'torchrun is gone')):\n"
        "    print(os.getpid(), flush=True)\n"
        "    ctypes.PyDLL(None).sleep(60)  # PyDLL: keeps Python's lock\n"
    )
    starts = (
        f"import subprocess; subprocess.run([{sys.executable!r}, {str(tmp_path / 'rank.py')!r}])"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", starts],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TORCHELASTIC_RUN_ID": "none"},
    )
    assert launcher.stdout is not None
    assert launcher.stdout.readline()
    begun = time.monotonic()
    launcher.kill()
    _, errors = launcher.communicate(timeout=30)  # until the rank and its watchdog have ended
    assert errors == "gtopk: torchrun is gone\n"
    assert time.monotonic() - begun < 25, "the body would have ended after 60 s"


def test_deadline_without_timeout_and_launcher_starts_no_process(monkeypatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    with deadline(WatchdogSettings(math.inf, "")):
        pass


PARENT = """
import os, signal, subprocess, sys

def start(number, program, **more):
    environ = {"OMPI_COMM_WORLD_RANK": str(number), "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}
    return subprocess.Popen([sys.executable, "-c", program], env={**os.environ, **environ}, **more)

idle = "import time; time.sleep(60)"
others = [start(number, idle) for number in (1, 2)]
first = start(0, sys.argv[1], stdout=subprocess.PIPE)
assert first.stdout.readline() == b"waits\\n"
if sys.argv[2] == "ends":
    others[1].kill()
    others[1].wait()
code = first.wait()
for other in others:
    other.kill()
sys.exit(code % 256)
"""
WAITS = """
import math, time
from gtopk.runtime.launch.job import Launched, ranks_here
from gtopk.runtime.liveness.watchdog import Siblings, WatchdogSettings, deadline

variables = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"
here = ranks_here(Launched("mpirun", 0, 3, variables))
with deadline(WatchdogSettings(math.inf, "", siblings=Siblings("{}", variables[0], 0, here, True))):
    time.sleep(1)
    print("waits", flush=True)
    time.sleep(WAITS)
"""


@pytest.mark.parametrize(
    ("rank_2", "errors", "code"), [("ends", "gtopk: rank 2 has ended\n", 247), ("stays", "", 0)]
)
def test_waiting_rank_names_a_rank_that_ends(rank_2, errors, code) -> None:
    waits = WAITS.replace("WAITS", "50" if rank_2 == "ends" else "4")
    job = subprocess.run(
        [sys.executable, "-c", PARENT, waits, rank_2],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (job.stderr, job.returncode) == (errors, code)


def test_age_seconds_counts_from_the_start_of_a_process() -> None:
    assert watchdog.age_seconds(2**22) == 0.0  # no such process
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert 0 <= watchdog.age_seconds(child.pid) < watchdog.age_seconds(os.getpid())
    finally:
        child.communicate(b"\n")


@pytest.mark.parametrize("holds_lock", [False, True])
def test_message_of_the_watchdog_is_written_to_the_failure_file(tmp_path, holds_lock) -> None:
    path = tmp_path / "failures" / "failure_rank1.json"
    body = (
        "from gtopk.runtime.liveness.watchdog import WatchdogSettings, deadline\n"
        f"settings = WatchdogSettings(0.2, 'rank 1 is late', "
        f"file={str(path)!r}, record={{'rank': 1}})\n"
        f"with deadline(settings, holds_lock={holds_lock}):\n"
        "    input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", body], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as child:
        assert child.wait(30) == -9
    written = json.loads(path.read_text())
    assert written.pop("time")[-6:] == "+00:00"
    assert written == {"rank": 1, "text": "rank 1 is late"}
    assert [each.name for each in path.parent.iterdir()] == [path.name]


class Launcher:
    """A launcher's processes as Linux would report them, and a clock."""

    def __init__(self, monkeypatch, roll: Siblings) -> None:
        self.rank_of: dict[int, str | None] = {}  # the reported rank by process
        self.started: dict[int, float] = {}
        self.seconds = 0.0
        monkeypatch.setattr(watchdog, "read_process", lambda pid: Process("S", 1))
        monkeypatch.setattr(watchdog, "_children", lambda pid: set(self.rank_of))
        monkeypatch.setattr(watchdog, "variable_of", lambda pid, name: self.rank_of[pid])
        monkeypatch.setattr(watchdog, "age_seconds", lambda pid: self.seconds - self.started[pid])
        monkeypatch.setattr(watchdog.time, "monotonic", lambda: self.seconds)
        self.caller = watchdog.SiblingWatch(roll, 100 + roll.rank)

    def start(self, *ranks: int) -> None:
        self.rank_of |= {100 + rank: str(rank) for rank in ranks}
        self.started |= {100 + rank: self.seconds for rank in ranks}

    def end(self, *ranks: int) -> None:
        for rank in ranks:
            del self.rank_of[100 + rank]

    def after(self, seconds: float) -> str:
        self.seconds += seconds
        return self.caller.missing()


FOUR = Siblings("", "RANK", 0, 4, is_all=True)


@pytest.fixture
def launcher(monkeypatch) -> Launcher:
    return Launcher(monkeypatch, FOUR)


def test_ended_rank_is_named_once_the_launcher_had_time_to_end_the_job(
    launcher,
) -> None:
    launcher.start(0, 1, 2, 3)
    assert launcher.after(5) == ""
    launcher.end(2)
    assert launcher.after(1) == launcher.after(0.9) == ""
    launcher.end(3)  # by its own watchdog, so it is not the missing one
    assert launcher.after(0.2) == "rank 2 has ended"


def test_late_first_check_does_not_wait_for_ranks_to_start(launcher) -> None:
    launcher.start(0, 1, 2)
    assert launcher.after(10) == ""  # while torch was imported
    assert launcher.after(1.1) == "rank 3 has ended"


def test_rank_that_ended_before_the_first_check_is_named_on_one_host(monkeypatch) -> None:
    for roll, message in (
        (FOUR, "ranks 2 and 3 have ended"),
        (FOUR._replace(is_all=False), "a rank"),
    ):
        launcher = Launcher(monkeypatch, roll)
        launcher.start(0, 1)
        assert launcher.after(0) == launcher.after(2.9) == ""  # others may follow
        assert launcher.after(0.2).startswith(message)


def test_ranks_that_start_one_after_the_other_are_waited_for(launcher) -> None:
    for rank in range(4):
        launcher.start(rank)
        assert launcher.after(2.9) == ""
    assert launcher.after(60) == ""
    launcher.end(1)
    assert launcher.after(0) == ""
    assert launcher.after(3.1) == "rank 1 has ended"


@pytest.mark.parametrize("rank_variable", [None, ""])
def test_process_whose_rank_is_unreadable_may_be_any_rank(launcher, rank_variable) -> None:
    """None: it overwrote its environment (setproctitle). "": it is not a rank (an ssh)."""
    launcher.start(0, 1, 2, 3)
    launcher.rank_of[103] = rank_variable
    assert launcher.after(0) == ""
    assert launcher.after(60) == ("" if rank_variable is None else "rank 3 has ended")
    launcher.end(2)
    launcher.after(0)
    assert launcher.after(3.1) == (
        "a rank has ended" if rank_variable is None else "rank 3 has ended"
    )


def test_rank_variables_that_contradict_the_launcher_are_ignored(launcher) -> None:
    """As when a pod sets RANK, and ranks are functions with an invisible environment."""
    launcher.start(0, 1, 2, 3)
    launcher.rank_of = {100: "0", 101: "0", 102: "0", 103: "0"}
    assert launcher.after(0) == launcher.after(60) == ""
    launcher.rank_of = {100: "7", 101: "1"}
    assert launcher.after(0) == launcher.after(60) == ""
    launcher.rank_of = {101: "1", 102: "2"}  # not even this one
    assert launcher.after(0) == launcher.after(60) == ""


def test_rank_variable_of_a_copy_of_the_launcher_is_ignored(launcher) -> None:
    launcher.start(0, 1, 2, 3)
    launcher.rank_of[103] = "0"  # still a copy of the launcher
    assert launcher.after(0) == ""
    launcher.start(3)
    assert launcher.after(0) == launcher.after(60) == ""
    launcher.end(3)
    launcher.after(0)
    assert launcher.after(3.1) == "rank 3 has ended"

"""What ends a start that would wait for ever."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time

import pytest

from gtopk.launch.deadline import deadline
from gtopk.launch.watchdog import Watch


def test_a_body_in_time_is_left_alone(capfd) -> None:
    with deadline(Watch(60, "late")):
        pass
    assert capfd.readouterr().err == ""


def test_a_body_that_hangs_without_releasing_the_lock_is_ended_with_a_word() -> None:
    program = (
        "import ctypes\n"
        "from gtopk.launch.deadline import deadline\n"
        "from gtopk.launch.watchdog import Watch\n"
        "with deadline(Watch(0.2, 'rank 1 is late')):\n"
        "    ctypes.PyDLL(None).sleep(60)  # PyDLL: keeps Python's lock\n"
    )
    child = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False
    )
    assert child.returncode == -9
    assert child.stderr == "rank 1 is late\n"


def test_a_body_whose_launcher_is_killed_is_ended_with_a_word(tmp_path) -> None:
    (tmp_path / "rank.py").write_text(
        "import ctypes, math, os\n"
        "from gtopk.launch.deadline import deadline\n"
        "from gtopk.launch.parent import launcher\n"
        "from gtopk.launch.watchdog import Watch\n"
        "with deadline(Watch(math.inf, '', launcher(), 'torchrun is gone')):\n"
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
    _, said = launcher.communicate(timeout=30)  # until the rank and what watches it have ended
    assert said == "torchrun is gone\n"
    assert time.monotonic() - begun < 25, "the body would have ended after 60 s"


def test_without_an_end_and_a_launcher_nothing_is_started(monkeypatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    with deadline(Watch(math.inf, "")):
        pass


PARENT = """
import json, os, subprocess, sys, threading, time

def start(number, program, wrapped=False):
    words = [sys.executable, "-c", program]
    if wrapped:  # by what stays in between, as a script does that goes on after Python
        words = ["/bin/sh", "-c", '"$0" "$@"; exit $?', *words]
    return subprocess.Popen(words, env={**os.environ, **said, "OMPI_COMM_WORLD_RANK": str(number)})

said = {"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}
waits, ends, stays, wrapped = json.loads(sys.argv[1])
ranks = [start(0, waits, wrapped), start(1, stays)]
time.sleep(0.5)  # launchers start one rank after the other
ranks.append(start(2, ends))
threading.Thread(target=ranks[2].wait, daemon=True).start()
code = ranks[0].wait()
for rank in ranks[1:]:
    rank.kill()
sys.exit(code % 256)
"""
WAITS = """
import math, time
from gtopk.launch.deadline import deadline
from gtopk.launch.launched import Launched
from gtopk.launch.parent import ranks_here
from gtopk.launch.watchdog import Watch

variables = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"
here = ranks_here(Launched("mpirun", 0, SIZE, variables))
watch = Watch(math.inf, "", ranks=here, missed="{}", variable=variables[0], is_all=ALL)
print("waits", here, flush=True)
with deadline(watch):
    time.sleep(6)
"""


def suffer_an_end(ends: str, is_all: bool, wrapped: bool = False) -> tuple[str, str, int]:
    """Have rank 0 of three wait while rank 2 runs `ends`; return stdout, stderr and its exit."""
    waits = WAITS.replace("SIZE", "3" if is_all else "6").replace("ALL", str(is_all))
    programs = json.dumps([waits, ends, "import time; time.sleep(9)", wrapped])
    done = subprocess.run(
        [sys.executable, "-c", PARENT, programs],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout, done.stderr, done.returncode


@pytest.mark.parametrize("is_all", [True, False])
def test_a_rank_that_ends_while_this_one_waits_is_named(is_all) -> None:
    out, said, code = suffer_an_end("import time; time.sleep(1.5)", is_all)
    assert out == "waits 3\n"
    assert said == "rank 2 has ended\n"
    assert code, "it has waited to the end"


def test_a_rank_that_ended_before_anybody_looked_is_named_where_all_are_of_this_host() -> None:
    assert suffer_an_end("", is_all=True)[1:] == ("rank 2 has ended\n", 247)
    assert suffer_an_end("", is_all=False)[1] == "a rank has ended\n"


def test_ranks_that_are_all_there_are_waited_for() -> None:
    assert suffer_an_end("import time; time.sleep(20)", is_all=True) == ("waits 3\n", "", 0)


def test_behind_a_shell_nobody_can_tell_who_is_missing() -> None:
    assert suffer_an_end("", is_all=True, wrapped=True) == ("waits 0\n", "", 0)

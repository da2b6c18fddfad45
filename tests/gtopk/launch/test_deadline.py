"""What ends a start that would wait for ever."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time

from gtopk.launch.deadline import deadline


def test_a_body_in_time_is_left_alone(capfd) -> None:
    with deadline(60, "late"):
        pass
    assert capfd.readouterr().err == ""


def test_a_body_that_hangs_without_releasing_the_lock_is_ended_with_a_word() -> None:
    program = (
        "import ctypes\n"
        "from gtopk.launch.deadline import deadline\n"
        "with deadline(0.2, 'rank 1 is late'):\n"
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
        "with deadline(math.inf, '', launcher=launcher(), orphaned='torchrun is gone'):\n"
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
    with deadline(math.inf, ""):
        pass

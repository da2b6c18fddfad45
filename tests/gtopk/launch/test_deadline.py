"""What ends a start that would wait for ever."""

from __future__ import annotations

import subprocess
import sys

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

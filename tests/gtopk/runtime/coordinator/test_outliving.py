"""Threads that outlive the main thread."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[3] / "programs" / "outlives.py"


@pytest.mark.parametrize(
    ("argument", "printed"),
    [
        ("begun", ["1.0", "1.0"]),
        ("exit handler", ["1.0"]),
        (
            "not begun",
            [
                "gtopk has shut down, as the main thread ended: 'allreduce.noname.1' cannot begin; "
                "join the training threads in the main thread (thread.join())"
            ],
        ),
    ],
)
def test_training_thread_outlives_main_only_if_it_has_begun(argument, printed) -> None:
    command = [sys.executable, str(PROGRAM), argument]
    child = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert child.returncode == 0, child.stderr
    assert child.stdout.splitlines() == printed

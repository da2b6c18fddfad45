"""A short run of the program that mutates messages; a command of its own runs it for long."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[3]


def fuzz(*arguments: str) -> str:
    """Return what the program printed; it must have ended well."""
    job = subprocess.run(
        [sys.executable, str(ROOT / "tests/programs/fuzz_wire.py"), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert job.returncode == 0, job.stdout + job.stderr
    return job.stdout


def test_mutated_messages_are_refused_or_decoded_alike_by_both_kernels() -> None:
    printed = fuzz("--messages", "6000")
    assert "6,000  messages, none crashed, hung or changed unnoticed" in printed
    for reached in ("checksum", "strictly increasing", "quotients", "blocks", "(accepted)"):
        assert reached in printed


def test_sanitizers_find_no_error_in_decoding_mutated_messages(
    sanitized: Callable[..., str],
) -> None:
    assert "1,000  messages, none crashed" in sanitized("fuzz_wire.py", "--messages", "1000")

"""A short run of the fuzzer for readers; `make fuzz` is the long one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.started import STARTED_PATH

ROOT = Path(__file__).parents[1]
LOADED = ("checkpoint_loaded", "checkpoint_names")  # whole folders, so fewer of them


def test_fuzzed_readers_refuse_damaged_inputs():
    """Inputs that once failed are in tests/corpus, and are read first."""
    job = subprocess.run(
        [sys.executable, str(ROOT / "tests/programs/fuzz_readers.py"), "--messages", "4800"],
        env={**os.environ, "PYTHONPATH": STARTED_PATH},
        capture_output=True,
        text=True,
    )
    assert job.returncode == 0, job.stdout + job.stderr
    targets = re.findall(r"(\w+): (\d+) kept, ([\d,]+) new inputs: (.*)", job.stdout)
    kept = {path.name: len(list(path.iterdir())) for path in (ROOT / "tests/corpus").iterdir()}
    assert {name: int(count) for name, count, *_ in targets if int(count)} == kept
    for name, _, inputs, ends in targets:
        assert inputs == ("100" if name in LOADED else "300"), name
        assert '"read"' in ends  # the code behind the checksums is reached
        # checkpoint_names ignores files with unknown names.
        assert re.search("Error|Malformed", ends) or name == "checkpoint_names"
    assert "none crashed, hung or was misread" in job.stdout

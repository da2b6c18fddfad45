"""One gradient crosses no more files on its way through a step than it did."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

# Includes the C++ core's files, which NumPy's kernels do not need.
MOST_FILES = {"DistributedOptimizer": 40, "DDP's hook": 36}


@pytest.fixture(scope="module")
def crossings_output(forked) -> str:
    """Return what one job of two ranks printed: files, calls, and calls by caller and callee."""
    job = forked(2, "../crossings.py", "--pairs")
    assert job.returncode == 0, job.stderr
    return job.stdout


def test_step_crosses_no_more_files_than_before(crossings_output: str) -> None:
    counts = re.findall(
        r"^(.+): (\d+) files, (\d+) calls from file to file$", crossings_output, re.M
    )
    assert {name for name, _, _ in counts} == {*MOST_FILES}
    assert all(int(calls) >= int(files) > 0 for _, files, calls in counts)
    assert [line for line in counts if int(line[1]) > MOST_FILES[line[0]]] == []


def test_calls_drawn_in_how_it_works_are_made_by_a_step(crossings_output: str) -> None:
    page = (Path(__file__).parents[1] / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    drawn = page.partition("## One step, file by file")[2].split("```")[1].strip().splitlines()
    of_optimizer = crossings_output.partition("DDP's hook")[0]
    calls = set(re.findall(r"^ *\d+  (\S+) -> (\S+)$", of_optimizer, re.M))
    above: list[str] = []
    for line in drawn:
        file = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        del above[depth:]
        if above:
            assert (above[-1], file) in calls, line
        above.append(file)

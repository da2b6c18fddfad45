"""One gradient crosses no more files on its way through a step than it did."""

from __future__ import annotations

import re

# With the C++ core, which NumPy's kernels do without.
MOST_FILES = {"DistributedOptimizer": 60, "DDP's hook": 53}


def test_a_step_goes_through_no_more_files_than_before(forked) -> None:
    done = forked(2, "../crossings.py")
    assert done.returncode == 0, done.stderr
    said = re.findall(r"^(.+): (\d+) files, (\d+) calls from file to file$", done.stdout, re.M)
    assert {name for name, _, _ in said} == {*MOST_FILES}
    assert all(int(calls) >= int(files) > 0 for _, files, calls in said)
    assert [line for line in said if int(line[1]) > MOST_FILES[line[0]]] == []

"""A script's threads and its loaders' workers neither disturb the ranks nor outlive them."""

from __future__ import annotations

import pytest

from tests.faults.jobs import LAUNCHERS, start


@pytest.mark.faults
@pytest.mark.timeout(900)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_loader_workers_and_threads_do_not_disturb_ranks(launcher):
    with start(launcher, 2, "workers_and_threads.py") as job:
        job.expect("nobody was in the way", seconds=600, times=2)
        assert job.process.wait(60) == 0, job.text()
        job.assert_nothing_is_left()
        assert not [line for line in job.lines if "gtopk:" in line], job.text()

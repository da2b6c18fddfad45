"""Every way to train begins with the line, and its reports have what was predicted."""

from __future__ import annotations

WAYS = 6  # of tests/programs/advised.py


def test_rank_0_says_it_once_and_all_ranks_predict(torchrun):
    job = torchrun(2, "advised.py", GTOPK_ADVICE="on", GTOPK_CALIBRATION="off")
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("every way, as it says") == 2
    said = [line for line in job.stderr.splitlines() if " values on " in line]
    assert [line.split(" values on ")[0] for line in said] == [
        f"gtopk: rank 0: {2 * values:,}" for values in range(501, 501 + WAYS)
    ]


def test_one_rank_that_wants_none_is_enough_for_none(torchrun):
    job = torchrun(2, "advised.py", "off", GTOPK_ADVICE="on", GTOPK_CALIBRATION="off")
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("every way, as it says") == 2
    assert " values on " not in job.stderr

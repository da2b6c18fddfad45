"""Every way to train begins with the line, and its reports have what was predicted."""

from __future__ import annotations

import re

import pytest

WAYS, FSDP = 6, 2  # of tests/programs/advised.py: how many, and the place of one


@pytest.mark.parametrize("ranks", [2, 4])
def test_rank_0_says_it_once_and_all_ranks_predict(torchrun, ranks):
    job = torchrun(ranks, "advised.py", GTOPK_ADVICE="on", GTOPK_CALIBRATION="off")
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("every way, as it says") == ranks
    said = re.findall(r"^gtopk: rank (\d): ([\d,]+) values on (\d) ranks", job.stderr, re.MULTILINE)
    expected = [("0", f"{2 * values:,}", str(ranks)) for values in range(501, 501 + WAYS)]
    if ranks == 4:  # of two replicas, two shards each: a rank exchanges half of the values
        expected[FSDP] = ("0", f"{501 + FSDP:,}", "2")
    assert said == expected


def test_one_rank_that_wants_none_is_enough_for_none(torchrun):
    job = torchrun(2, "advised.py", "off", GTOPK_ADVICE="on", GTOPK_CALIBRATION="off")
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("every way, as it says") == 2
    assert " values on " not in job.stderr

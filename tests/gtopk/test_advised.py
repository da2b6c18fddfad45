"""Every way to train begins with the line, and its reports have what was predicted."""

from __future__ import annotations

import re

import pytest

from tests.matrix import some_of

# Of tests/programs/advised.py: how many ways there are, and the places of some.
WAYS, FSDP, ADASUM, IN_MEMORY, NODES = 10, 2, 6, (7, 8), 9


@pytest.mark.parametrize("ranks", some_of([2, 4], 4))
def test_rank_0_says_it_once_and_all_ranks_predict(torchrun, ranks):
    job = torchrun(ranks, "advised.py", GTOPK_ADVICE="on", GTOPK_CALIBRATION="off")
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("every way, as it says") == ranks
    start = r"^gtopk: rank (\d): (?:estimated exchange per ([\w -]+), )?([\d,]+) values,? (.*)$"
    found = re.findall(start, job.stderr, re.MULTILINE)
    lines = [(rank, values, said) for rank, _, values, said in found]
    expected = [("0", f"{2 * values:,}") for values in range(501, 501 + WAYS)]
    if ranks == 4:  # of two replicas, two shards each: a rank exchanges half of the values
        expected[FSDP] = ("0", f"{501 + FSDP:,}")
    assert [line[:2] for line in lines] == expected
    among = dict.fromkeys(range(WAYS), ranks) | dict.fromkeys((FSDP, NODES), 2)
    for way, (*_, said) in enumerate(lines):
        if way in IN_MEMORY:
            assert said.startswith(f"in this host's memory, on which {ranks} workers step: ")
            continue
        assert said.startswith(f"{among[way]} ranks, ")
        assert re.search(r"(; \S+( \S+)? pays below|pays at (no|every) bandwidth)", said)
        assert ("op=Adasum as it runs here is beyond the model" in said) == (way == ADASUM)
        assert (found[way][1] == "merge of all nodes") == (way == NODES)


def test_one_rank_that_wants_none_is_enough_for_none(torchrun):
    job = torchrun(2, "advised.py", "off", GTOPK_ADVICE="on", GTOPK_CALIBRATION="off")
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("every way, as it says") == 2
    assert "estimated exchange" not in job.stderr

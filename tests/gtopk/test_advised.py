"""Every way to train first logs the advice, and its reports have the prediction."""

from __future__ import annotations

import re

import pytest

from tests.matrix import some_of

# In tests/programs/advised.py: the number of ways to train, and the indices of some.
WAYS, FSDP, ADASUM, IN_MEMORY, NODES = 10, 2, 6, (7, 8), 9


@pytest.mark.parametrize("ranks", some_of([2, 4], 4))
def test_rank_0_logs_advice_once_per_way_and_all_ranks_predict(forked, ranks):
    settings = {"GTOPK_ADVICE": "on", "GTOPK_CALIBRATION": "off", "GTOPK_LOG": "debug"}
    job = forked(ranks, "advised.py", **settings)
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("every way, as it says") == ranks
    details = r"^gtopk: rank (\d): estimated exchange per ([\w -]+), ([\d,]+) values,? (.*)$"
    found = re.findall(details, job.stderr, re.MULTILINE)
    expected = {way: f"{2 * (501 + way):,}" for way in range(WAYS) if way not in IN_MEMORY}
    if ranks == 4:  # two replicas of two shards: a rank exchanges half of the values
        expected[FSDP] = f"{501 + FSDP:,}"
    assert [(rank, values) for rank, _, values, _ in found] == [
        ("0", values) for values in expected.values()
    ]
    among = dict.fromkeys(range(WAYS), ranks) | dict.fromkeys((FSDP, NODES), 2)
    for way, (_, per, _, advice) in zip(expected, found, strict=True):
        assert advice.startswith(f"{among[way]} ranks, ")
        assert re.search(r"(; \S+( \S+)? pays below|pays at (no|every) bandwidth)", advice)
        assert ("the model does not cover op=Adasum as it runs here" in advice) == (way == ADASUM)
        assert (per == "merge of all nodes") == (way == NODES)
    sentences = re.findall(r"^gtopk: rank 0: (\d) ranks over gloo", job.stderr, re.MULTILINE)
    assert sentences == [str(among[way]) for way in expected]
    in_memory = re.findall(r"^gtopk: rank 0: (\d) workers update ", job.stderr, re.MULTILINE)
    assert in_memory == [str(ranks)] * len(IN_MEMORY)
    (verdict,) = re.findall("^.*compare with a dense run$", job.stderr, re.MULTILINE)
    assert verdict.startswith("gtopk: rank 0: compression ")


def test_advice_switched_off_on_one_rank_is_logged_by_none(forked):
    job = forked(2, "advised.py", "off", GTOPK_ADVICE="on", GTOPK_CALIBRATION="off")
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("every way, as it says") == 2
    assert "(estimate)" not in job.stderr
    assert "compare with a dense run" not in job.stderr

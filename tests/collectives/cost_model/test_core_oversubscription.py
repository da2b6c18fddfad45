"""Tests of the number of ranks per core, and of the ranks that share a node's link."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from collectives.cores import core_quota
from collectives.cost import Link
from collectives.cost_model.network import (
    Network,
    Placement,
    most_per_core,
    own_placement,
    ranks_per_core,
)
from collectives.cost_model.prediction import Bucket
from collectives.transports import local_world, run_ranks


def seats(
    count: int, cores: int | list[int], quota: float = math.inf, group: str = "", machine: str = "m"
) -> list[Placement]:
    allowed = list(range(cores)) if isinstance(cores, int) else cores
    return [Placement(machine, allowed, quota, group)] * count


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (seats(4, 4), 1.0),
        (seats(3, 4), 1.0),
        (seats(6, 2), 3.0),
        # With several machines, the most loaded one counts.
        (seats(4, 2) + seats(2, 2, machine="n"), 2.0),
        # Each bound to its own core, or most of them to the same.
        (seats(1, [0]) + seats(1, [1]), 1.0),
        (seats(3, [0]) + seats(1, [1, 2, 3, 4, 5, 6, 7]), 3.0),
        (seats(3, [0, 1]) + seats(2, [1, 2]), 5 / 3),
        # Containers on one machine with a quota of half a core each.
        (seats(1, 2, 0.5, "a") + seats(1, 2, 0.5, "b"), 2.0),
        # A container with a quota of two, whatever the names of its hosts.
        (seats(4, 64, 2.0, "a"), 2.0),
        (seats(4, 64, 4.0, "a") + seats(4, 64, 4.0, "b"), 1.0),
        (seats(2, 64, 4.0, "a") + seats(2, 64, 1.0, "b"), 2.0),
    ],
)
def test_ranks_of_one_machine_share_its_cores(told, expected):
    assert most_per_core(told) == pytest.approx(expected)
    assert most_per_core(told[::-1]) == pytest.approx(expected)


def test_every_rank_hears_the_same_of_those_that_share_this_machine():
    cores = min(len(os.sched_getaffinity(0)), core_quota())
    assert run_ranks(local_world(5), ranks_per_core) == [pytest.approx(max(1.0, 5 / cores))] * 5


def test_without_a_boot_id_a_host_counts_as_a_machine(tmp_path: Path):
    seat = own_placement(tmp_path / "boot_id")
    assert seat.machine == os.uname().nodename
    (tmp_path / "boot_id").write_text("1b4e\n")
    assert own_placement(tmp_path / "boot_id") == seat._replace(machine="1b4e")


@pytest.mark.parametrize("burst_bytes", [500, 3000, 100_000])
@pytest.mark.parametrize("sharing", [1, 2, 8])
def test_ranks_of_a_node_share_its_token_bucket(sharing: int, burst_bytes: int) -> None:
    """They take as long as a single rank that sends all their bytes."""
    link = Link(1e-4, 1e-6, burst_bytes)
    own = Network(2 * sharing, link, sharing).link(sharing)
    together, alone = Bucket(burst_bytes), Bucket(burst_bytes)
    for times, message_bytes, pause_seconds in ((1, 900, 0.0), (3, 100, 2e-4), (2, 4000, 1e-3)):
        of_all = alone.pass_on(times, sharing * message_bytes, link, pause_seconds, 1)
        of_one = together.pass_on(times, message_bytes, own, pause_seconds, sharing)
        assert of_one * own.seconds_per_byte == pytest.approx(of_all * link.seconds_per_byte)

"""Tests of the number of ranks per core, and of the ranks that share a node's link."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from collectives.cores import granted_cores
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


def placed(
    count: int, cores: int | list[int], quota: float = math.inf, group: str = "", machine: str = "m"
) -> list[Placement]:
    allowed = list(range(cores)) if isinstance(cores, int) else cores
    return [Placement(machine, allowed, quota, group)] * count


@pytest.mark.parametrize(
    ("placements", "expected"),
    [
        (placed(4, 4), 1.0),
        (placed(3, 4), 1.0),
        (placed(6, 2), 3.0),
        # With several machines, the most loaded one counts.
        (placed(4, 2) + placed(2, 2, machine="n"), 2.0),
        # Each bound to its own core, or most of them to the same.
        (placed(1, [0]) + placed(1, [1]), 1.0),
        (placed(3, [0]) + placed(1, [1, 2, 3, 4, 5, 6, 7]), 3.0),
        (placed(3, [0, 1]) + placed(2, [1, 2]), 5 / 3),
        # Containers on one machine with a quota of half a core each.
        (placed(1, 2, 0.5, "a") + placed(1, 2, 0.5, "b"), 2.0),
        # A container with a quota of two, whatever the names of its hosts.
        (placed(4, 64, 2.0, "a"), 2.0),
        (placed(4, 64, 4.0, "a") + placed(4, 64, 4.0, "b"), 1.0),
        (placed(2, 64, 4.0, "a") + placed(2, 64, 1.0, "b"), 2.0),
    ],
)
def test_most_per_core_counts_the_ranks_that_share_cores_and_quotas(placements, expected):
    assert most_per_core(placements) == pytest.approx(expected)
    assert most_per_core(placements[::-1]) == pytest.approx(expected)


def test_ranks_per_core_is_the_same_on_every_rank():
    cores = min(len(os.sched_getaffinity(0)), granted_cores()[0])
    assert run_ranks(local_world(5), ranks_per_core) == [pytest.approx(max(1.0, 5 / cores))] * 5


def test_machine_is_the_boot_id_or_else_the_host_name(monkeypatch, tmp_path: Path):
    monkeypatch.setattr("collectives.cores._BOOT_ID", tmp_path / "boot_id")
    assert own_placement().machine == os.uname().nodename
    (tmp_path / "boot_id").write_text("1b4e\n")
    assert own_placement().machine == "1b4e"


@pytest.mark.parametrize("burst_bytes", [500, 3000, 100_000])
@pytest.mark.parametrize("sharing", [1, 2, 8])
def test_ranks_of_a_node_share_its_token_bucket(sharing: int, burst_bytes: int) -> None:
    """The ranks of a node take as long as a single rank that sends all their bytes."""
    link = Link(1e-4, 1e-6, burst_bytes)
    own = Network(2 * sharing, link, sharing).link(sharing)
    together, alone = Bucket(burst_bytes), Bucket(burst_bytes)
    for times, message_bytes, pause_seconds in ((1, 900, 0.0), (3, 100, 2e-4), (2, 4000, 1e-3)):
        bytes_alone = alone.pass_on(times, sharing * message_bytes, link, pause_seconds, 1)
        bytes_together = together.pass_on(times, message_bytes, own, pause_seconds, sharing)
        assert bytes_together * own.seconds_per_byte == pytest.approx(
            bytes_alone * link.seconds_per_byte
        )

"""How many ranks share a core."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from collectives.cores import allowed_cores, core_quota
from collectives.planning.crowding import Seat, most_per_core, own_seat, ranks_per_core
from collectives.transports import local_world, run_ranks


def seats(machine: str, host: str, cores: str, count: int, quota: float = math.inf) -> list[Seat]:
    return [Seat(machine, host, cores.split(), quota)] * count


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (seats("m", "a", "0 1 2 3", 4), 1.0),
        (seats("m", "a", "0 1 2 3", 3), 1.0),
        (seats("m", "a", "0 1", 6), 3.0),
        # Hosts that one machine emulates, one rank on each.
        (seats("m", "a", "0 1", 1) + seats("m", "b", "0 1", 1) + seats("m", "c", "0 1", 1), 1.5),
        # Real ones: the fullest counts.
        (seats("m", "a", "0 1", 4) + seats("n", "b", "0 1", 2), 2.0),
        # Each bound to a core of its own.
        (seats("m", "a", "0", 1) + seats("m", "a", "1", 1), 1.0),
        # Containers of one machine, each of which is granted half of a core.
        (seats("m", "a", "0 1", 1, 0.5) + seats("m", "b", "0 1", 1, 0.5), 2.0),
        (seats("m", "a", "0 1 2 3", 4, 2.0), 2.0),
    ],
)
def test_ranks_of_one_machine_share_its_cores_whatever_their_hosts_are_called(told, expected):
    assert most_per_core(told) == pytest.approx(expected)
    assert most_per_core(told[::-1]) == pytest.approx(expected)


def test_every_rank_hears_the_same_of_those_that_share_this_machine():
    cores = min(len(allowed_cores()), core_quota())
    assert run_ranks(local_world(5), ranks_per_core) == [pytest.approx(max(1.0, 5 / cores))] * 5


def test_where_the_kernel_does_not_tell_its_boot_a_host_is_a_machine(tmp_path: Path):
    seat = own_seat(tmp_path / "boot_id")
    assert seat.machine == seat.host
    (tmp_path / "boot_id").write_text("1b4e\n")
    assert own_seat(tmp_path / "boot_id") == seat._replace(machine="1b4e")

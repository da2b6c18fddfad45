"""A sum with checksums is measured beside one without, on the same ranks."""

from __future__ import annotations

from collectives import local_world, run_ranks
from mpi_scripts.bench_checked_messages import COLUMNS, line, measure


def test_every_length_is_measured_with_and_without_checksums():
    size, lengths = 3, (10, 5000)
    worlds = local_world(size), local_world(size)
    sums = []

    def program(plain):
        pair = plain, worlds[1][plain.rank]
        rows = list(measure(pair, lengths, rounds=2))
        assert [transport.checks_messages for transport in pair] == [False, True]
        sums.append([transport.traffic.sent_bytes for transport in pair])
        return rows

    for rows in run_ranks(worlds[0], program):
        assert [row.length for row in rows] == list(lengths)
        for row in rows:
            assert min(row.seconds) > 0
            assert line(row).count("|") == len(COLUMNS) + 1
    assert all(plain < checked for plain, checked in sums)

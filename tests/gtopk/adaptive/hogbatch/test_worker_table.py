"""Only overlapping writes are counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from collectives.transports import LocalTransport
from gtopk.adaptive.hogbatch.ledger import WorkerTable


def open_table(transport: LocalTransport) -> WorkerTable:
    return WorkerTable(transport.shared_memory(WorkerTable.size_bytes(transport.size)))


def test_rows_are_visible_to_all_workers(threads: Callable[..., Any]) -> None:
    def program(transport: LocalTransport) -> None:
        table = open_table(transport)
        table["size"] = 10 + transport.rank
        table.add("updates", transport.rank)
        transport.barrier()
        assert table.rows["size"].tolist() == [10 + rank for rank in range(transport.size)]
        assert table.total("updates") == sum(range(transport.size))
        assert table["size"] == 10 + transport.rank
        transport.barrier()

    threads(3, program)


def test_sequential_writes_do_not_overlap(threads: Callable[..., Any]) -> None:
    def program(transport: LocalTransport) -> int:
        table = open_table(transport)
        for turn in range(6):
            transport.barrier()
            if turn % transport.size == transport.rank:
                with table.writing():
                    pass
        return table["overlapped"]

    assert threads(3, program) == [0, 0, 0]


def test_concurrent_writes_overlap_on_both_sides(threads: Callable[..., Any]) -> None:
    def program(transport: LocalTransport) -> int:
        table = open_table(transport)
        if transport.rank == 2:  # never writes
            transport.barrier()
            transport.barrier()
            return table["overlapped"]
        with table.writing():
            transport.barrier()
            transport.barrier()
        return table["overlapped"]

    assert threads(3, program) == [1, 1, 0]


def test_write_within_another_write_counts_as_overlap(threads: Callable[..., Any]) -> None:
    """Rank 0's write begins and ends during rank 1's."""

    def program(transport: LocalTransport) -> int:
        table = open_table(transport)
        if transport.rank == 1:
            with table.writing():
                transport.barrier()
                transport.barrier()
        else:
            transport.barrier()
            with table.writing():
                pass
            transport.barrier()
        return table["overlapped"]

    assert threads(2, program) == [1, 1]

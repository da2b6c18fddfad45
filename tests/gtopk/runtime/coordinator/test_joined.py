"""A joined rank takes part as a join shadow until all have joined; all learn the last rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from collectives.transports import LocalTransport, Transport
from gtopk.errors import HorovodInternalError
from gtopk.runtime.coordinator import Engine, Settings
from gtopk.runtime.coordinator.fusion import Dense

QUICK = Settings(idle_seconds=0.05)


def with_engine(program: Any) -> Any:
    def rank(transport: LocalTransport) -> Any:
        engine = Engine(transport, QUICK)
        try:
            return program(engine, transport.rank)
        finally:
            engine.close("the test ended")

    return rank


def reduce(engine: Engine, name: str, value: float, reduction: str = "sum") -> float:
    array = np.full(2, value, np.float32)
    operation = engine.submit(name, [], lambda t, v: array, fusion=[Dense(array, reduction)])
    return float(operation.wait()[0])


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_joined_rank_adds_nothing_to_operations_of_the_others(threads, ranks):
    def program(engine: Engine, rank: int) -> tuple[list[float], int]:
        found = []
        for _ in range(2):  # after all have joined, everything works as before
            found += [reduce(engine, f"step {step}", 10.0 + rank) for step in range(rank + 1)]
            last = engine.join().wait()
        return found, last

    for rank, (found, last) in enumerate(threads(ranks, with_engine(program))):
        steps = [sum(10.0 + r for r in range(step, ranks)) for step in range(rank + 1)]
        assert found == steps * 2
        assert last == ranks - 1


def test_join_returns_the_last_rank_to_join_on_all_ranks(threads):
    def program(engine: Engine, rank: int) -> list[int]:
        answers = []
        for busy in (0, 1, 2, 1):
            if rank == busy:
                for step in range(5):
                    reduce(engine, f"step {step}", 1.0)
            answers.append(engine.join().wait())
        return answers

    assert threads(3, with_engine(program)) == [[0, 1, 2, 1]] * 3


@pytest.mark.parametrize(
    ("reduction", "expected"), [("sum", 5.0), ("product", 6.0), ("min", 2.0), ("max", 3.0)]
)
def test_joined_rank_changes_no_reduction(threads, reduction, expected):
    def program(engine: Engine, rank: int) -> float | None:
        found = reduce(engine, "a", 2.0 + rank, reduction) if rank < 2 else None
        engine.join().wait()
        return found

    assert threads(3, with_engine(program)) == [expected, expected, None]


def test_allgather_raises_while_a_rank_is_joined_and_works_afterwards(threads):
    def program(engine: Engine, rank: int) -> list[int]:
        def gather() -> Any:
            def work(transport: Transport, all_flags: list[int]) -> list[int]:
                message = np.array([transport.rank], np.uint8)
                return [int(m[0]) for m in transport.allgather(message)]

            return engine.submit("gather", [], work).wait()

        for _ in range(2):  # also with a cache slot
            if rank != 1:
                with pytest.raises(HorovodInternalError, match="'gather' needs every rank, and ra"):
                    gather()
                assert reduce(engine, "sum", 1.0) == 2.0
            engine.join().wait()
            found = gather()
        return found

    assert threads(3, with_engine(program)) == [[0, 1, 2]] * 3


def test_joined_rank_takes_part_by_the_join_descriptor(threads):
    def program(engine: Engine, rank: int) -> list[int] | None:
        def contribute(value: int) -> Any:
            def work(transport: Transport, all_flags: list[int]) -> list[int]:
                message = np.array([value], np.uint8)
                return [int(m[0]) for m in transport.allgather(message)]

            return work

        engine.shadow_work = lambda name, join_descriptor: contribute(join_descriptor[0])
        found = None
        if rank != 2:
            found = engine.submit(
                "gather", [], contribute(rank), join_descriptor=bytes([77])
            ).wait()
        engine.join().wait()
        return found

    assert threads(3, with_engine(program)) == [[0, 1, 77], [0, 1, 77], None]


def test_joined_rank_cannot_submit_until_all_have_joined(threads):
    def program(engine: Engine, rank: int) -> None:
        if rank == 1:
            joined = engine.join()
            with pytest.raises(ValueError, match="'a' cannot begin: this rank's join"):
                engine.submit("a", [], lambda transport, all_flags: None)
            with pytest.raises(ValueError, match="already pending"):
                engine.join()
            joined.wait()
        else:
            reduce(engine, "b", 1.0)
            engine.join().wait()
        reduce(engine, "c", 1.0)

    threads(2, with_engine(program))


def test_join_raises_when_another_rank_leaves(threads):
    def program(engine: Engine, rank: int) -> None:
        engine.submit("a", [], lambda transport, all_flags: None).wait()
        if rank == 1:
            return
        with pytest.raises(HorovodInternalError, match=r"rank 1 left \(the test ended\)"):
            engine.join().wait()

    threads(3, with_engine(program))

"""The engine agrees, runs in order, and survives what is only a disagreement."""

from __future__ import annotations

from typing import Any

import pytest

from collectives.transports import LocalTransport
from gtopk.engine import Engine
from gtopk.exceptions import HorovodInternalError


def with_engine(program: Any) -> Any:
    def rank(transport: LocalTransport) -> Any:
        engine = Engine(transport)
        try:
            return program(engine, transport.rank)
        finally:
            engine.close("the test ended")

    return rank


def test_operations_run_in_the_order_submitted(threads):
    def program(engine: Engine, rank: int) -> list[str]:
        ran: list[str] = []
        operations = [
            engine.submit(name, [], lambda transport, votes, name=name: ran.append(name))
            for name in "abc"
        ]
        for operation in reversed(operations):
            operation.wait()
        return ran

    assert threads(3, with_engine(program)) == [["a", "b", "c"]] * 3


def test_every_rank_gets_every_vote(threads):
    def program(engine: Engine, rank: int) -> Any:
        return engine.submit("a", [], lambda transport, votes: votes, vote=10 * rank).wait()

    assert threads(4, with_engine(program)) == [[0, 10, 20, 30]] * 4


def test_a_mismatch_is_the_same_error_everywhere_and_the_next_operation_goes_on(threads):
    def program(engine: Engine, rank: int) -> tuple[str, str]:
        wrong = engine.submit("a", [f"shape [{rank // 2}]"], lambda transport, votes: None)
        right = engine.submit("b", [], lambda transport, votes: "fine")
        with pytest.raises(HorovodInternalError) as error:
            wrong.wait()
        return str(error.value), right.wait()

    text = "the ranks disagree about a: ranks 0, 1: shape [0]; rank 2: shape [1]"
    assert threads(3, with_engine(program)) == [(text, "fine")] * 3


def test_what_work_raises_is_what_wait_raises(threads):
    def program(engine: Engine, rank: int) -> None:
        def work(transport: Any, votes: list[int]) -> None:
            raise ZeroDivisionError("boom")

        with pytest.raises(ZeroDivisionError, match="boom"):
            engine.submit("a", [], work).wait()

    threads(2, with_engine(program))


def test_whoever_leaves_is_named_to_those_who_go_on(threads):
    def program(engine: Engine, rank: int) -> None:
        engine.submit("a", [], lambda transport, votes: None).wait()
        if rank == 1:
            return
        for name in ("b", "c"):
            with pytest.raises(HorovodInternalError, match=r"rank 1 left \(the test ended\)"):
                engine.submit(name, [], lambda transport, votes: None).wait()

    threads(3, with_engine(program))


def test_an_engine_that_was_closed_refuses(threads):
    def program(transport: LocalTransport) -> None:
        engine = Engine(transport)
        engine.close("done")
        with pytest.raises(HorovodInternalError, match="has been shut down"):
            engine.submit("a", [], lambda transport, votes: None).wait()

    threads(1, program)

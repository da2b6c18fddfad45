"""The engine agrees, runs in order, and survives what is only a disagreement."""

from __future__ import annotations

from typing import Any

import pytest

from collectives.errors import MismatchError
from collectives.transports import LocalTransport
from gtopk.agreement import agree, describe_mismatch, name_ranks
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


def test_another_order_names_both_operations(threads):
    def program(engine: Engine, rank: int) -> list[str]:
        names = ["a", "b"] if rank == 0 else ["b", "a"]
        operations = [engine.submit(name, [], lambda transport, votes: None) for name in names]
        texts = []
        for operation in operations:
            with pytest.raises(HorovodInternalError) as error:
                operation.wait()
            texts.append(str(error.value))
        return texts

    for texts in threads(2, with_engine(program)):
        assert texts == [
            "the ranks disagree about their next operation: rank 0: a; rank 1: b",
            "the ranks disagree about their next operation: rank 0: b; rank 1: a",
        ]


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


def test_agreeing_takes_one_small_message_a_round(threads):
    def program(transport: LocalTransport) -> Any:
        transport.traffic.take()
        agree(transport, ["a", "shape [3]" * 1000], vote=7)
        return transport.traffic.take()

    for traffic in threads(4, program):
        assert traffic.sent_messages == 2
        assert traffic.sent_bytes < 200


def test_a_mismatch_quotes_only_what_differs():
    common = ["gradients.1", "op=Average"]
    text = describe_mismatch(
        [[*common, "k=5", "b [2]"], [*common, "k=5", "b [3]"], [*common, "k=5", "b [2]"]]
    )
    assert text == "the ranks disagree about gradients.1: ranks 0, 2: b [2]; rank 1: b [3]"


def test_a_rank_that_has_less_to_say_is_named_too():
    text = describe_mismatch([["a", "x", "y"], ["a", "x"]])
    assert text == "the ranks disagree about a: rank 0: y; rank 1: less"


def test_agree_raises_the_mismatch_itself(threads):
    def program(transport: LocalTransport) -> None:
        with pytest.raises(MismatchError):
            agree(transport, ["a", str(transport.rank)], 0)

    threads(2, program)


def test_ranks_are_named_as_people_do():
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([0, 2]) == "ranks 0, 2"

"""Operations are matched by name in any order; all ranks run the same, or raise."""

from __future__ import annotations

import re
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from collectives.transports import LocalTransport, local_world, run_ranks
from gtopk.errors import HorovodInternalError
from gtopk.runtime.coordinator import Engine, Event, Settings, execution
from gtopk.runtime.coordinator.fusion import Dense

QUICK = Settings(idle_seconds=0.05)


def with_engine(program: Any, settings: Settings = QUICK) -> Any:
    def rank(transport: LocalTransport) -> Any:
        engine = Engine(transport, settings)
        try:
            return program(engine, transport.rank)
        finally:
            engine.close("the test ended")

    return rank


def nothing(transport: Any, all_flags: list[int]) -> None:
    """Do nothing: only the agreement matters."""


def total(value: float, length: int = 3) -> dict[str, Any]:
    """Return the arguments of an operation that sums the ranks' values."""
    array = np.full(length, value, np.float32)
    return {"work": lambda transport, all_flags: array, "fusion": [Dense(array)]}


def test_operations_run_in_the_order_submitted(threads):
    def program(engine: Engine, rank: int) -> list[str]:
        ran: list[str] = []
        operations = [
            engine.submit(name, [], lambda transport, all_flags, name=name: ran.append(name))
            for name in "abc"
        ]
        for operation in reversed(operations):
            operation.wait()
        return ran

    assert threads(3, with_engine(program)) == [["a", "b", "c"]] * 3


@pytest.mark.parametrize("ranks", [2, 3])
def test_operations_run_in_one_order_when_ranks_submit_in_different_orders(threads, ranks):
    names = [f"tensor.{number}" for number in range(20)]

    def program(engine: Engine, rank: int) -> list[list[str]]:
        orders = []
        for step in range(3):  # new names, then cached ones
            ran: list[str] = []
            own_order = np.random.default_rng([rank, step]).permutation(names).tolist()
            operations = [
                engine.submit(
                    name, [], lambda transport, all_flags, name=name, ran=ran: ran.append(name)
                )
                for name in own_order
            ]
            for operation in operations:
                operation.wait()
            orders.append(ran)
        return orders

    orders = threads(ranks, with_engine(program))
    assert orders == [orders[0]] * ranks
    assert all(sorted(order) == sorted(names) for order in orders[0])


@pytest.mark.parametrize("ranks", [2, 3])
def test_operation_stays_pending_across_barriers_until_last_rank_submits(threads, ranks):
    def program(engine: Engine, rank: int) -> list[float]:
        late = rank == ranks - 1
        if not late:
            pending = engine.submit("late", [], **total(rank))
        for step in range(3):
            engine.submit(f"barrier.{step}", [], nothing).wait()
            engine.submit("each step", [], **total(rank)).wait()
        if late:
            pending = engine.submit("late", [], **total(rank))
        return pending.wait().tolist()

    expected = float(sum(range(ranks)))
    assert threads(ranks, with_engine(program)) == [[expected] * 3] * ranks


def test_flags_may_differ_and_change_and_reach_all_ranks(threads):
    def program(engine: Engine, rank: int) -> list[list[int]]:
        return [
            engine.submit("a", [], lambda transport, all_flags: all_flags, flags=rank * step).wait()
            for step in (0, 1, 1, 5, -7, 0)
        ]

    ranks = [0, 1, 2]
    expected = [[rank * step for rank in ranks] for step in (0, 1, 1, 5, -7, 0)]
    assert threads(3, with_engine(program)) == [expected] * 3


def test_mismatch_raises_same_error_on_all_ranks_and_next_operation_runs(threads):
    def program(engine: Engine, rank: int) -> tuple[str, str]:
        wrong = engine.submit("a", [f"shape [{rank // 2}]"], nothing)
        right = engine.submit("b", [], lambda transport, all_flags: "fine")
        with pytest.raises(HorovodInternalError) as error:
            wrong.wait()
        return str(error.value), right.wait()

    text = "the ranks disagree about a: ranks 0, 1: shape [0]; rank 2: shape [1]"
    assert threads(3, with_engine(program)) == [(text, "fine")] * 3


def test_signature_of_cached_name_may_change_on_all_ranks_but_not_on_some(threads):
    def program(engine: Engine, rank: int) -> list[str]:
        outcomes = []
        for signature in ("[3]", "[3]", "[4]", "[4]", f"[{4 + rank // 2}]", "[4]"):
            operation = engine.submit("a", [signature], lambda transport, all_flags: "fine")
            try:
                outcomes.append(operation.wait())
            except HorovodInternalError as error:
                outcomes.append(str(error))
        return outcomes

    text = "the ranks disagree about a: ranks 0, 1: [4]; rank 2: [5]"
    expected = ["fine", "fine", "fine", "fine", text, "fine"]
    assert threads(3, with_engine(program)) == [expected] * 3


def test_dense_arrays_of_different_lengths_are_a_mismatch(threads):
    def program(engine: Engine, rank: int) -> str:
        with pytest.raises(HorovodInternalError) as error:
            engine.submit("a", ["x"], **total(1, length=3 + rank)).wait()
        return str(error.value)

    text = (
        "the ranks disagree about a: rank 0: float32 [3] sum prescale_factor=1.0 "
        "postscale_factor=1.0; rank 1: float32 [4] sum prescale_factor=1.0 postscale_factor=1.0"
    )
    assert threads(2, with_engine(program)) == [text] * 2


def test_deadlock_raises_on_all_ranks_and_later_operations_run(threads):
    """No rank can ever submit the operation that the others wait for."""

    def program(engine: Engine, rank: int) -> tuple[str, float, float]:
        pending = engine.submit("pending", [], **total(1.0)) if rank else None
        with pytest.raises(HorovodInternalError) as error:
            engine.submit("ab"[rank // 2], [], nothing).wait()
        after = engine.submit("after", [], **total(1.0)).wait()
        pending = pending or engine.submit("pending", [], **total(1.0))
        return str(error.value), after[0], pending.wait()[0]

    text = "the ranks disagree about their next operation: ranks 0, 1: a; rank 2: b"
    assert threads(3, with_engine(program)) == [(text, 3.0, 3.0)] * 3


def test_second_thread_may_submit_while_the_engine_looks_for_a_stuck_one(threads):
    asked = threading.Event()

    class Slow(set):
        def __len__(self) -> int:
            size = super().__len__()
            if size == 1:
                asked.set()
                time.sleep(0.2)
            return size

    def program(engine: Engine, rank: int) -> None:
        if rank == 0:
            engine._submitters = Slow()
            first = engine.submit("a", [], nothing)
        assert asked.wait(10)
        if rank == 1:
            first = engine.submit("a", [], nothing)
        with ThreadPoolExecutor() as pool:
            second = pool.submit(engine.submit, "b", [], nothing).result()
        first.wait()
        second.wait()

    threads(2, with_engine(program))


def test_name_in_flight_is_refused_until_its_operation_ends(threads):
    def program(engine: Engine, rank: int) -> None:
        held = threading.Event()
        operation = engine.submit("a", [], lambda transport, all_flags: held.wait())
        with pytest.raises(ValueError, match="'a' is still in flight"):
            engine.submit("a", [], nothing)
        held.set()
        operation.wait()
        engine.submit("a", [], nothing).wait()

    threads(2, with_engine(program))


def test_wait_raises_what_the_operation_raised(threads):
    def program(engine: Engine, rank: int) -> None:
        def work(transport: Any, all_flags: list[int]) -> None:
            raise ZeroDivisionError("boom")

        with pytest.raises(ZeroDivisionError, match="boom"):
            engine.submit("a", [], work).wait()

    threads(2, with_engine(program))


def test_burst_of_small_arrays_takes_one_cycle_and_one_reduction(threads):
    names = [f"gradient.{number}" for number in range(50)]

    def program(engine: Engine, rank: int) -> tuple[int, int]:
        reductions = 0
        allreduce = engine.transport.allreduce

        def counted(array: Any, reduction: str = "sum") -> None:
            nonlocal reductions
            reductions += 1
            allreduce(array, reduction)

        engine.transport.allreduce = counted  # type: ignore[method-assign]
        for _ in range(2):
            engine.submit("barrier", [], nothing).wait()
            before = engine.cycles
            reductions = 0
            arrays = [np.full(5, number, np.float32) for number in range(50)]
            operations = [
                engine.submit(name, [], lambda transport, all_flags, a=a: a, fusion=[Dense(a)])
                for name, a in zip(names, arrays, strict=True)
            ]
            for number, operation in enumerate(operations):
                assert operation.wait().tolist() == [number * engine.transport.size] * 5
        return engine.cycles - before, reductions

    patient = Settings(cycle_seconds=1.0)  # until a caller waits
    assert threads(3, with_engine(program, patient)) == [(1, 1)] * 3


def test_results_do_not_depend_on_cache_capacity(threads):
    def program(engine: Engine, rank: int) -> list[float]:
        return [
            engine.submit(f"tensor.{number % 7}", [], **total(number)).wait()[0]
            for number in range(40)
        ]

    for capacity in (0, 1, 3, 7):
        results = threads(2, with_engine(program, QUICK._replace(cache_capacity=capacity)))
        assert results == [[2.0 * number for number in range(40)]] * 2


def test_results_are_correct_when_ranks_have_different_limits(threads):
    def program(transport: LocalTransport) -> list[float]:
        limits = Settings(
            cache_capacity=transport.rank, fusion_threshold_bytes=1000 * transport.rank
        )
        return with_engine(lambda engine, rank: sums(engine), limits)(transport)

    def sums(engine: Engine) -> list[float]:
        found = []
        for _ in range(3):
            operations = [engine.submit(f"{n}", [], **total(n)) for n in range(5)]
            found += [operation.wait()[0] for operation in operations]
        return found

    assert threads(3, program) == [[0.0, 3.0, 6.0, 9.0, 12.0] * 3] * 3


def test_error_names_rank_that_left(threads):
    def program(engine: Engine, rank: int) -> None:
        engine.submit("a", [], nothing).wait()
        if rank == 1:
            return
        for name in ("b", "c"):
            with pytest.raises(HorovodInternalError, match=r"rank 1 left \(the test ended\)"):
                engine.submit(name, [], nothing).wait()

    threads(3, with_engine(program))


@pytest.mark.parametrize("ranks", [2, 3])
def test_operation_submitted_before_a_rank_left_completes(threads, ranks):
    def program(engine: Engine, rank: int) -> float:
        engine.submit("first", [], nothing).wait()
        if rank == 0:
            return engine.submit("last", [], **total(1.0)), engine.submit("never", [], nothing)
        time.sleep(0.1)
        last = engine.submit("last", [], **total(1.0)).wait()[0]
        with pytest.raises(HorovodInternalError, match="has been shut down"):
            engine.submit("after", [], nothing).wait()
        return last

    (last, never), *others = threads(ranks, with_engine(program))
    assert others == [float(ranks)] * (ranks - 1)
    assert last.wait()[0] == float(ranks)
    with pytest.raises(HorovodInternalError, match="has been shut down"):
        never.wait()


def test_closed_engine_refuses_operations(threads):
    def program(transport: LocalTransport) -> None:
        engine = Engine(transport)
        engine.close("done")
        with pytest.raises(HorovodInternalError, match="has been shut down"):
            engine.submit("a", [], nothing).wait()

    threads(1, program)


def test_idle_rank_takes_part_in_no_cycles(threads):
    def program(engine: Engine, rank: int) -> int:
        engine.submit("a", [], nothing).wait()
        before = engine.cycles
        time.sleep(0.3)
        return engine.cycles - before

    assert threads(2, with_engine(program, Settings())) == [0, 0]


def test_waiting_ranks_take_part_in_few_cycles(threads):
    def program(engine: Engine, rank: int) -> int:
        shared = engine.submit("a", [], nothing)
        own = engine.submit(f"of rank {rank}", [], nothing)
        shared.wait()
        time.sleep(0.4)
        other = engine.submit(f"of rank {1 - rank}", [], nothing)
        other.wait()
        own.wait()
        return engine.cycles

    cycles = threads(2, with_engine(program, Settings()))
    assert max(cycles) < 100  # every 8 ms at most, once the pause has grown


def test_stall_warning_names_missing_rank_and_stall_shutdown_ends_wait(threads, capsys):
    limits = Settings(stall_warning_seconds=0.1, stall_shutdown_seconds=0.5)

    def program(engine: Engine, rank: int) -> str:
        if rank == 1:
            time.sleep(1.0)
            operation = engine.submit("b", [], nothing)
        else:
            operation = engine.submit("a", [], nothing)
        with pytest.raises(HorovodInternalError) as error:
            operation.wait()
        return str(error.value)

    for text in threads(3, with_engine(program, limits)):
        assert "for rank 1 in a; HOROVOD_STALL_SHUTDOWN_TIME_SECONDS" in text
    output = capsys.readouterr().err
    for rank in (0, 2):
        assert f"rank {rank} has waited 0." in output
    assert "for rank 1 in a; ready: ranks 0, 2" in output
    assert "rank 1 has waited" not in output


def test_rank_missing_from_checkpoint_is_reported_early_and_once(threads, capfd, monkeypatch):
    monkeypatch.setattr(execution, "_EARLY_WARNING_SECONDS", 0.1)
    outputs: list[str] = []
    name = "allgather.checkpoint.problem.content"

    def program(engine: Engine, rank: int) -> None:
        if rank == 1:
            time.sleep(0.5)
        engine.submit("other", [], nothing).wait()
        while rank == 1 and not any("\n" in text for text in outputs):
            outputs.append(capfd.readouterr().err)
            time.sleep(0.01)
        if rank == 1:
            time.sleep(0.5)
            outputs.append(capfd.readouterr().err)
        engine.submit(name, [], nothing).wait()

    threads(2, with_engine(program, Settings(idle_seconds=0.05)))
    (line,) = "".join(outputs).splitlines()
    waits = rf"rank 0 has waited 0\.\d+ s for rank 1 in {name}; ready: rank 0; every rank must"
    assert re.search(waits, line)
    assert "do not call them under `if hvd.rank() == 0`" in line


@pytest.mark.parametrize(
    "error", [BrokenPipeError, ValueError], ids=["broken pipe", "closed stream"]
)
def test_stall_warning_that_cannot_be_printed_raises_nothing(threads, monkeypatch, error):
    attempts: list[str] = []

    def write(text: str) -> None:
        attempts.append(text)
        raise error

    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=write, flush=lambda: None))

    def program(engine: Engine, rank: int) -> None:
        while rank == 1 and not attempts:
            time.sleep(0.01)
        engine.submit("late", [], nothing).wait()

    threads(2, with_engine(program, Settings(idle_seconds=0.05, stall_warning_seconds=0.1)))
    assert "rank 0 has waited 0." in attempts[0]


def test_stall_shutdown_ends_waits_of_a_world_that_announces_none(capsys):
    limits = Settings(stall_warning_seconds=0.01, stall_shutdown_seconds=0.2)

    def program(engine: Engine, rank: int) -> None:
        with pytest.raises(HorovodInternalError, match="has waited"):
            engine.submit("ab"[rank], [], nothing).wait()

    run_ranks(local_world(2, 30, announces_waits=False), with_engine(program, limits))
    assert "has waited" not in capsys.readouterr().err


def test_operation_that_only_some_ranks_submit_ends_after_the_timeout():
    def program(engine: Engine, rank: int) -> str:
        if rank == 1:
            time.sleep(0.6)
        with pytest.raises(HorovodInternalError) as error:
            engine.submit("ab"[rank], [], nothing).wait()
        return str(error.value)

    for text in run_ranks(local_world(2, timeout_seconds=0.4), with_engine(program)):
        assert "for rank 1 in a; set a larger GTOPK_TIMEOUT (seconds) to wait longer" in text


def test_observers_receive_events_from_first_submission_to_the_end(threads):
    def program(engine: Engine, rank: int) -> list[tuple[Any, ...]]:
        events: list[Event] = []
        engine.submit("before", [], nothing).wait()
        engine.add_observer(events.append)
        operations = [engine.submit(name, [], **total(1.0)) for name in "ab"]
        for operation in operations:
            operation.wait()
        engine.submit("c", [], nothing).wait()
        engine.remove_observer(events.append)
        assert [event.seconds for event in events] == sorted(event.seconds for event in events)
        return [event[:3] + event[4:] for event in events]

    patient = Settings(cycle_seconds=1.0)
    observed = threads(2, with_engine(program, patient))
    assert observed[0] == observed[1]
    of_a = [(phase, what, rank) for phase, what, name, rank in observed[0] if name == "a"]
    assert of_a == [
        ("begin", "negotiate", None),
        ("mark", "ready", 0),
        ("mark", "ready", 1),
        ("end", "negotiate", None),
        *((phase, what, None) for phase, what in _FUSED),
    ]
    of_c = [(phase, what) for phase, what, name, rank in observed[0] if name == "c"]
    assert of_c[-2:] == [("begin", "execute"), ("end", "execute")]
    assert ("mark", "cycle", "", None) in observed[0]


_FUSED = (
    ("begin", "execute"),
    ("begin", "copy-in"),
    ("end", "copy-in"),
    ("begin", "reduce"),
    ("end", "reduce"),
    ("begin", "copy-out"),
    ("end", "copy-out"),
    ("end", "execute"),
)


def test_engine_of_a_subset_runs_and_closes_without_the_other_ranks(threads):
    def program(transport: LocalTransport) -> list[float]:
        engine = Engine(transport, QUICK)
        members = [0, 2] if transport.rank % 2 == 0 else [1, 3]
        some = Engine(transport.subset(members), QUICK)
        found = []
        for step in range(3 + transport.rank % 2):  # a different number on each side
            found.append(some.submit(f"{step}", [], **total(transport.rank)).wait()[0])
        with pytest.raises(HorovodInternalError, match=f"ranks? {members[0]}.*rank {members[1]}"):
            some.submit("x", [f"rank {transport.rank}"], nothing).wait()
        some.close("the set ended")
        found.append(engine.submit("all", [], **total(1.0)).wait()[0])
        engine.close("the test ended")
        return found

    even, odd = [2.0] * 3 + [4.0], [4.0] * 4 + [4.0]
    assert threads(4, program) == [even, odd, even, odd]


def test_close_with_leave_timeout_returns_the_ranks_that_stay(threads):
    given_up = threading.Event()

    def program(transport: LocalTransport) -> Any:
        engine = Engine(transport, QUICK)
        assert engine.failure is None
        if transport.rank == 1:
            assert given_up.wait(20)
            failure = engine.failure
            engine.close("the test ended")
            return str(failure)
        staying = engine.close("begins anew", leave_timeout_seconds=0.05)
        given_up.set()
        return staying

    first, second = threads(2, program)
    assert first == [1]
    assert "rank 0 left (begins anew)" in second


def test_finished_operation_holds_no_array(threads):
    def program(engine: Engine, rank: int) -> bool:
        array = np.zeros(3)
        seen = weakref.ref(array)
        engine.submit("a", [], lambda transport, all_flags: None, fusion=[Dense(array)]).wait()
        del array
        engine.submit("b", [], nothing).wait()  # by now the thread has dropped it too
        return seen() is None

    assert threads(2, with_engine(program)) == [True, True]

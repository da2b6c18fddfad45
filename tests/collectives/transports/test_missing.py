"""Waiting ranks name the ranks that have left or are silent."""

from __future__ import annotations

import sys
import threading
import time

import numpy as np
import pytest

from collectives import PeerError, PeerTimeoutError, Transport
from collectives.transports import local_world
from collectives.transports.departure import DepartureNotice
from collectives.transports.polling import wait_until
from tests.collectives.transports.kinds import MESSAGE, every_kind


@every_kind
def test_waiting_rank_names_the_departed_rank_and_its_reason(in_world, kind: str) -> None:
    def program(transport: Transport) -> None:
        if transport.rank == 1:
            transport.leave("its data ran out")
            return
        text = r"rank 1 left \(its data ran out\) while rank 0 waited for it in bucket 3 of step 7"
        with pytest.raises(PeerError, match=text), transport.operation("bucket 3 of step 7"):
            transport.receive(1)
        transport.leave("a peer is gone")

    in_world(kind, 2, program, 30)


@every_kind
@pytest.mark.parametrize("size", [3, 4, 7])
def test_all_waiting_ranks_name_the_departed_rank(in_world, kind: str, size: int) -> None:
    def program(transport: Transport) -> None:
        with transport.operation("step 0"):
            transport.barrier()
        if transport.rank == size - 1:
            transport.leave("done early")
            return
        with pytest.raises(PeerError) as caught, transport.operation("step 1"):
            transport.receive((transport.rank + 1) % (size - 1))  # which also waits
        # Even if another rank noticed first, and left for that reason.
        assert str(caught.value) == (
            f"rank {size - 1} left (done early) while rank {transport.rank} waited for it in step 1"
        )
        transport.leave(str(caught.value))

    in_world(kind, size, program, 30)


@pytest.mark.parametrize("through", ["all ranks", "a view"])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_rank_with_its_part_done_may_shut_horovod_down_at_once(
    in_world, size: int, through: str
) -> None:
    """Rank 0 has nothing to do in the last operation; the others pass a message on, slowly."""

    def program(transport: Transport) -> None:
        stream = transport if through == "all ranks" else transport.channel(3)
        with stream.operation("the last step"):
            if stream.rank > 1:
                assert stream.receive(stream.rank - 1).tobytes() == b"news"
            if 0 < stream.rank < size - 1:
                time.sleep(0.02)
                stream.send(np.frombuffer(b"news", np.uint8), stream.rank + 1)()
        transport._horovod.shutdown()

    in_world("horovod", size, program, 30)


@pytest.mark.parametrize("consequence_first", [False, True])
def test_first_departed_rank_is_named_whichever_notice_came_first(consequence_first: bool) -> None:
    first, second, last = local_world(3)
    with second.operation("step 0"), last.operation("step 0"):
        first.announce_departure("enough")
        second.announce_departure("rank 0 is gone")
        heard = {rank: DepartureNotice.decode(f.encode()) for rank, f in last.departures().items()}
        if consequence_first:
            del heard[0]
        last._left = heard
        text = "rank 0 left (enough) while rank 2 waited for it in step 0"
        assert last.missing(1) == last.missing(None) == text


def test_nested_operation_is_part_of_the_outer_one() -> None:
    leaver, stayer = local_world(2)
    with leaver.operation("step 0"), leaver.operation("a part"):
        pass
    leaver.announce_departure("done")
    with stayer.operation("step 0"):
        with stayer.operation("a part"):
            assert stayer.activity == "step 0"
        assert stayer.missing(None) is None
    with stayer.operation("step 1"), stayer.operation("a part"):
        assert stayer.missing(None) == "rank 0 left (done) while rank 1 waited for it in step 1"


@every_kind
def test_rank_that_completed_the_operation_is_not_missed_in_it(in_world, kind: str) -> None:
    def program(transport: Transport) -> list[np.ndarray]:
        with transport.operation("the only step"):
            gathered = transport.allgather(MESSAGE)
        transport.leave("done")
        return gathered

    for gathered in in_world(kind, 5, program, 30):
        assert [m.tobytes() for m in gathered] == [MESSAGE.tobytes()] * 5


@every_kind
def test_rank_that_failed_in_an_operation_is_missed_in_it(in_world, kind: str) -> None:
    def program(transport: Transport) -> None:
        if transport.rank == 0:
            with pytest.raises(ZeroDivisionError), transport.operation("step 0"):
                raise ZeroDivisionError
        elif transport.rank == 1:
            text = r"rank 0 left \(it failed\) while rank 1 waited for it in step 0"
            with pytest.raises(PeerError, match=text), transport.operation("step 0"):
                transport.receive(2)
        else:
            with pytest.raises(PeerError, match="rank 1 left"):
                transport.receive(1)
        transport.leave("it failed")

    in_world(kind, 3, program, 30)


@every_kind
def test_message_sent_before_departure_still_arrives(in_world, kind: str) -> None:
    def program(transport: Transport) -> None:
        if transport.rank == 0:
            transport.send(MESSAGE, 1)()
        else:
            assert transport.receive(0).tobytes() == MESSAGE.tobytes()
            with pytest.raises(PeerError, match=r"rank 0 left \(done\) .* in an exchange"):
                transport.receive(0)
        transport.leave("done")

    in_world(kind, 2, program)


@every_kind
@pytest.mark.parametrize("of_a_view", [False, True])
def test_silent_rank_is_named_after_the_timeout(in_world, kind: str, of_a_view: bool) -> None:
    def program(transport: Transport) -> None:
        if transport.rank == 0:
            waiting = transport.channel(1) if of_a_view else transport
            text = r"rank 0 has waited 0\.2\d* s for rank 1 in a long wait"
            with pytest.raises(PeerTimeoutError, match=text), waiting.operation("a long wait"):
                waiting.receive(1)
            transport.send(MESSAGE, 1)()  # a rank whose wait timed out can still send
        else:
            time.sleep(0.4)
            assert transport.receive(0).tobytes() == MESSAGE.tobytes()

    in_world(kind, 2, program, 0.2)


@every_kind
@pytest.mark.parametrize("of_a_view", [False, True])
def test_waiting_rank_uses_little_cpu_time(in_world, kind: str, of_a_view: bool) -> None:
    def program(transport: Transport) -> None:
        stream = transport.channel(1) if of_a_view else transport
        if transport.rank == 1:
            time.sleep(1)
            stream.send(MESSAGE, 0)()
        elif transport.rank == 0:
            begun, begun_cpu = time.monotonic(), time.thread_time()
            stream.receive(1)
            share = (time.thread_time() - begun_cpu) / (time.monotonic() - begun)
            assert share < 0.6, "of a core"

    in_world(kind, 3, program)


def test_missing_works_while_many_ranks_leave() -> None:
    # Each call walks through all who left; the interpreter switches threads as often as it can.
    size = 60
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(10):
            world = local_world(size, timeout_seconds=30)
            leaver = threading.Thread(
                target=lambda w=world: [t.announce_departure("done") for t in w[1:]]
            )
            leaver.start()
            while leaver.is_alive():
                world[0].missing(0)
            leaver.join()
    finally:
        sys.setswitchinterval(interval)


@every_kind
def test_run_raises_the_exception_of_the_failed_rank(in_world, kind: str) -> None:
    seen = []

    def program(transport: Transport) -> None:
        if transport.rank == 1:
            raise ZeroDivisionError("in step 3")
        try:
            transport.barrier()
        except PeerError as error:
            seen.append(str(error))
            raise

    with pytest.raises(ZeroDivisionError, match="in step 3"):
        in_world(kind, 3, program, 30)
    assert any("rank 1 left (it raised ZeroDivisionError: in step 3)" in text for text in seen)


def test_message_sent_before_departure_counts_after_a_false_alarm() -> None:
    """Rank 1 is taken for lost until its notice comes; rank 2 leaves after its message arrived."""
    transport, *_ = local_world(3)
    arrived: list[str] = []
    events = [
        lambda: transport.lose(1, "its connection is lost"),
        lambda: transport.note(1, DepartureNotice({0: 1}, "it is done")),
        lambda: (
            transport.note(2, DepartureNotice({}, "it failed")),
            arrived.append("its message"),
        ),
    ]

    def poll() -> None:
        events.pop(0)()

    with transport.operation("step 1"):
        assert (
            wait_until(lambda: arrived[0] if arrived else None, transport, [], 30, poll)
            == arrived[0]
        )

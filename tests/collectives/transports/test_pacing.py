"""Messages over an emulated link take its modelled time; each rank has a model clock.

A rank's clock stands still while it computes, and advances to the arrival of a message, so that a
collective's time depends exactly on the link alone.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives import MessageError, local_world, reduce, run_ranks, select
from collectives.cost import Link, dense_bytes
from collectives.cost_model.calibration import measure_network
from collectives.transports import Carrier, LocalTransport, pacing, torch_distributed
from collectives.transports.pacing import Clock, Pacer, append_stamp, split_stamp

LINK = Link.of(100e6, 0.4e-3)


class ModelClock(Clock):
    """A clock that advances only while its rank waits."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def now(self) -> float:
        return self.seconds

    def wait_until(self, at: float, progress: Callable[[], None]) -> None:
        self.seconds = max(self.seconds, at)


def emulate(transport: Carrier, link: Link = LINK) -> ModelClock:
    """Pace a transport's messages by a clock that is a model, and return the clock."""
    transport.emulate(link)
    transport._pacer.clock = ModelClock()
    return transport._pacer.clock


def paced(size: int, program: Callable[[LocalTransport], object], link: Link = LINK) -> list[float]:
    """Return how long each rank of a world takes for a program."""

    def timed(transport: LocalTransport) -> float:
        clock = emulate(transport, link)
        begun = clock.now()
        program(transport)
        return clock.now() - begun

    return run_ranks(local_world(size, timeout_seconds=30), timed)


def on_the_wire(message_bytes: int, link: Link = LINK) -> float:
    return pacing.wire_bytes(message_bytes) * link.seconds_per_byte


def test_message_takes_its_bytes_over_the_rate_plus_the_latency():
    def program(transport: LocalTransport) -> None:
        if transport.rank == 0:
            transport.send(np.zeros(50_000, np.uint8), 1)()
        else:
            assert transport.receive(0).size == 50_000

    sender, receiver = paced(2, program)
    assert sender == pytest.approx(on_the_wire(50_000))  # until its link is free
    assert receiver == pytest.approx(on_the_wire(50_000) + 0.4e-3)


def test_wire_bytes_count_packet_headers():
    assert pacing.wire_bytes(0) == 90
    assert pacing.wire_bytes(1448) == 1538
    assert pacing.wire_bytes(1449) == 1449 + 180


def test_messages_to_several_ranks_are_sent_one_after_the_other():
    def program(transport: LocalTransport) -> None:
        if transport.rank == 0:
            for sent in [transport.send(np.zeros(10_000, np.uint8), to) for to in (1, 2, 3)]:
                sent()
        else:
            transport.receive(0)

    took = paced(4, program)
    assert took == pytest.approx(
        [3 * on_the_wire(10_000)] + [n * on_the_wire(10_000) + 0.4e-3 for n in (1, 2, 3)]
    )


@pytest.mark.parametrize("sources", [(1, 2, 3), (3, 1, 2)])
def test_messages_from_several_ranks_share_the_link_in_any_receive_order(sources):
    def program(transport: LocalTransport) -> None:
        if transport.rank == 0:
            for source in sources:
                transport.receive(source)
        else:
            transport.send(np.zeros(10_000, np.uint8), 0)()

    assert paced(4, program)[0] == pytest.approx(3 * on_the_wire(10_000) + 0.4e-3)


def test_link_is_duplex_and_shared_by_all_streams():
    def program(transport: LocalTransport) -> None:
        peer = 1 - transport.rank
        for stream in (transport, transport.channel(3)):
            stream.send(np.zeros(20_000, np.uint8), peer)
        transport.channel(3).receive(peer)
        transport.receive(peer)

    assert paced(2, program) == pytest.approx([2 * on_the_wire(20_000) + 0.4e-3] * 2)


def test_message_to_the_own_rank_takes_no_time():
    def program(transport: LocalTransport) -> None:
        transport.send(np.zeros(20_000, np.uint8), transport.rank)()
        assert transport.receive(transport.rank).size == 20_000

    assert paced(2, program) == [0.0, 0.0]


@given(
    st.permutations(range(6)),
    st.lists(st.floats(0, 10), min_size=6, max_size=6),
    st.lists(st.integers(0, 100_000), min_size=6, max_size=6),
)
def test_last_message_ends_as_in_order_of_arrival(order, begins, sizes):
    pacer = Pacer(LINK)
    last = max(pacer.reserve_inbound(begins[each], sizes[each]) for each in order)
    expected = 0.0
    for each in sorted(range(6), key=lambda each: begins[each]):
        expected = max(expected, begins[each] + 0.4e-3) + on_the_wire(sizes[each])
    assert last == pytest.approx(expected)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_allreduce_takes_the_minimal_bytes_over_the_rate(size):
    length = 1_000_000

    def program(transport: LocalTransport) -> None:
        array = np.full(length, transport.rank, np.float32)
        transport.allreduce(array)
        assert (array == size * (size - 1) / 2).all()

    least = on_the_wire(dense_bytes(length, size))
    for took in paced(size, program):
        assert least <= took <= 1.02 * least + 6 * math.log2(size) * LINK.latency_seconds


@pytest.mark.parametrize("size", [2, 4, 8])
def test_sparse_reductions_take_their_messages_over_the_rate(size):
    rng = np.random.default_rng(7)
    gradients = rng.standard_normal((size, 100_000)).astype(np.float32)

    def seconds(algorithm: str) -> float:
        sent: list[int] = []

        def program(transport: LocalTransport) -> None:
            reduce(select(gradients[transport.rank], 5000)[0], 5000, transport, algorithm)
            sent.append(transport.traffic.sent_bytes)

        took = max(paced(size, program))
        assert took >= on_the_wire(min(sent))
        return took

    assert seconds("gtopk") < 2 * seconds("topk-allgather")
    if size == 8:
        assert seconds("gtopk") < seconds("topk-allgather")


@pytest.mark.parametrize("kind", ["torch.distributed", "horovod"])
def test_every_transport_paces_as_the_local_one_without_native_allreduce(
    in_world, kind, monkeypatch
):
    monkeypatch.setattr(torch_distributed, "NATIVE_BYTES", 0)

    def program(transport: Carrier) -> tuple[float, int]:
        clock = emulate(transport)
        assert transport.native_bytes() == sys.maxsize
        begun = clock.now()
        transport.traffic.read_and_reset()
        array = np.full(50_000, transport.rank, np.float32)
        transport.allreduce(array)
        assert (array == 3).all()
        return clock.now() - begun, transport.traffic.sent_bytes

    found, expected = in_world(kind, 3, program), in_world("local", 3, program)
    assert [sent for _, sent in found] == [sent for _, sent in expected]
    assert [took for took, _ in found] == pytest.approx([took for took, _ in expected])


def test_pacing_does_not_change_counted_bytes_and_applies_to_views():
    def program(transport: LocalTransport) -> int:
        view = transport.subset([0, 1]).channel(2)
        assert view.link == transport.link
        view.exchange(np.zeros(1000, np.uint8), 1 - view.rank)
        return transport.traffic.sent_bytes

    def with_link(transport: LocalTransport) -> int:
        emulate(transport)
        return program(transport)

    assert run_ranks(local_world(2), program) == [1000, 1000]
    assert run_ranks(local_world(2), with_link) == [1000, 1000]


def test_waiting_for_the_link_is_counted_in_wait_seconds():
    def program(transport: LocalTransport) -> float:
        emulate(transport)
        if transport.rank == 0:
            transport.send(np.zeros(50_000, np.uint8), 1)()
        else:
            transport.receive(0)
        return transport.traffic.wait_seconds

    waited = run_ranks(local_world(2), program)
    assert min(waited) >= on_the_wire(50_000) - 1e-9


def test_checked_messages_are_paced_including_their_checksum():
    def program(transport: LocalTransport) -> None:
        transport.check_messages()
        if transport.rank == 0:
            transport.send(np.zeros(1440, np.uint8), 1)()
        else:
            assert transport.receive(0).size == 1440

    assert paced(2, program)[1] == pytest.approx(1538 * LINK.seconds_per_byte + 0.4e-3)


def test_message_without_a_time_stamp_names_its_sender():
    message, begins = split_stamp(append_stamp(np.arange(5, dtype=np.uint8), 12.5), 3)
    assert message.tolist() == [0, 1, 2, 3, 4]
    assert begins == 12.5
    with pytest.raises(
        MessageError, match="from rank 3 is malformed: its 7 bytes have no time stamp"
    ):
        split_stamp(np.zeros(7, np.uint8), 3)


def test_emulated_link_between_several_hosts_is_refused():
    with pytest.raises(ValueError, match=r"ranks of one host.*has 2 of 4 ranks on its host"):
        local_world(4, node_size=2)[0].emulate(LINK)


def test_calibration_measures_the_emulated_link_between_ranks_of_one_host():
    def program(transport: LocalTransport) -> None:
        clock = emulate(transport, Link.of(10e6, 1e-3))
        assert transport.node() == [transport.rank]
        assert transport.neighbours() == [0, 1]
        network, nodes = measure_network(transport, clock.now)
        assert nodes == 2
        assert network.between.bits_per_second == pytest.approx(10e6, rel=0.1)
        assert network.between.latency_seconds == pytest.approx(1e-3, rel=0.2)
        assert "emulated link of 10 Mbit/s, 1 ms" in transport.library()

    run_ranks(local_world(2), program)


def test_clock_waits_and_calls_progress_meanwhile():
    clock, calls = Clock(), []
    at = clock.now() + 0.005
    clock.wait_until(at, lambda: calls.append(clock.now()))
    assert clock.now() >= at
    assert calls
    calls.clear()
    clock.wait_until(clock.now() - 1, lambda: calls.append(0.0))
    assert not calls

"""The laws of every transport.

Run on any number of ranks, with the transport's name; tests/collectives/transports runs them
in threads, too.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest

from collectives import Transport
from collectives.cost import dense_bytes, rounds
from collectives.kernels.narrow import BFLOAT16, narrow, widen
from collectives.transports import reductions

SIZES = (0, 1, 15, 16, 17, 31, 32, 33, 1000)
DTYPES = (np.int32, np.int64, np.float16, np.float32, np.float64)
REDUCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "sum": lambda rows: rows.sum(axis=0),
    "product": lambda rows: rows.prod(axis=0),
    "min": lambda rows: rows.min(axis=0),
    "max": lambda rows: rows.max(axis=0),
}


def message(size: int, *seed: int) -> np.ndarray:
    """Return bytes that follow from the seed."""
    return np.random.default_rng([size, *seed]).integers(0, 256, size, np.uint8)


def others(transport: Transport) -> list[int]:
    return [rank for rank in range(transport.size) if rank != transport.rank]


def lengths(transport: Transport) -> list[int]:
    """Return array lengths around the number of ranks, and larger ones."""
    size = transport.size
    return sorted({0, 1, size - 1, size, size + 1, 7, 333})


def test_messages_of_a_rank_arrive_unchanged_and_in_order(transport: Transport) -> None:
    waits = [
        transport.send(message(size, transport.rank, peer), peer)
        for peer in others(transport)
        for size in SIZES
    ]
    for peer in reversed(others(transport)):
        for size in SIZES:
            received = transport.receive(peer)
            assert received.dtype == np.uint8
            assert received.tobytes() == message(size, peer, transport.rank).tobytes()
    for wait in waits:
        wait()


def test_sent_and_received_messages_share_no_memory(transport: Transport) -> None:
    peer = transport.rank ^ 1
    if peer < transport.size:
        sent = message(100, 1)
        wait = transport.send(sent, peer)
        received = transport.receive(peer)
        wait()
        sent[:] = 0
        assert received.tobytes() == message(100, 1).tobytes()
        received[:] = 1
        assert not sent.any()


def test_exchange_swaps_messages_of_different_sizes(transport: Transport) -> None:
    peer = transport.rank ^ 1
    if peer < transport.size:
        for size in SIZES:
            received = transport.exchange(message(size * (transport.rank + 1), 2), peer)
            assert received.tobytes() == message(size * (peer + 1), 2).tobytes()


def test_exchange_all_delivers_every_message_by_source(transport: Transport) -> None:
    # Rank r, this one included, gets r messages of many sizes.
    size, rank = transport.size, transport.rank
    parcels = [
        (message(SIZES[(rank + number) % len(SIZES)], rank, to, number), to)
        for to in range(size)
        for number in range(to + 1)
    ]
    expected = [
        (source, message(SIZES[(source + number) % len(SIZES)], source, rank, number))
        for source in reversed(range(size))
        for number in range(rank + 1)
    ]
    received = transport.exchange_all(iter(parcels), [source for source, _ in expected])
    assert [m.tobytes() for m in received] == [content.tobytes() for _, content in expected]


def test_exchange_all_may_go_one_way(transport: Transport) -> None:
    following, last = transport.rank + 1, transport.size - 1
    parcels = [(message(100, transport.rank), following)] if transport.rank < last else []
    sources = [transport.rank - 1] if transport.rank else []
    received = list(transport.exchange_all(parcels, sources))
    assert [m.tobytes() for m in received] == [message(100, s).tobytes() for s in sources]


def test_allgather_returns_messages_in_rank_order(transport: Transport) -> None:
    for size in (0, 1, 16, 100):  # rank 0's is empty; for 0 everyone's is
        gathered = transport.allgather(message(size * transport.rank, transport.rank))
        assert [m.tobytes() for m in gathered] == [
            message(size * rank, rank).tobytes() for rank in range(transport.size)
        ]


def test_broadcast_returns_the_roots_message(transport: Transport) -> None:
    for root, size in itertools.product(range(transport.size), (0, 1, 16, 100)):
        own = message(size, root) if transport.rank == root else None
        assert transport.broadcast(own, root).tobytes() == message(size, root).tobytes()


def test_objects_are_gathered_and_broadcast(transport: Transport) -> None:
    objects = [
        [rank, rank / 3, "größer", {"none": None, "is": [True, []]}]
        for rank in range(transport.size)
    ]
    assert transport.gather_object(objects[transport.rank]) == objects
    (infinite,) = {*transport.gather_object(float("inf"))}
    assert infinite == float("inf")
    for root in range(transport.size):
        assert transport.broadcast_object(objects[transport.rank], root) == objects[root]


def test_allreduce_reduces_every_dtype_exactly(transport: Transport) -> None:
    # Small integers: every dtype holds every sum and product of them exactly, in any order.
    for dtype, length in itertools.product(DTYPES, lengths(transport)):
        rows = np.random.default_rng(length).choice([-2, -1, 1, 2], (transport.size, length))
        for reduction, expected in REDUCTIONS.items():
            framed = np.full(length + 2, 77, dtype)
            array = framed[1:-1]
            array[:] = rows[transport.rank]
            transport.allreduce(array, reduction)
            assert array.tolist() == expected(rows).tolist(), (dtype, reduction, length)
            assert framed[0] == framed[-1] == 77


def test_nan_of_any_rank_is_the_minimum_and_the_maximum(transport: Transport) -> None:
    """Also for arrays that are long enough for the library's own reduction."""
    rank, size = transport.rank, transport.size
    native = transport.native_bytes() // 4
    cases = [(length, dtype) for length in (size, 40_000) for dtype in ("f2", "f4", "f8")]
    for length, dtype in [*cases, (native, "f4")] if 0 < native < 1 << 23 else cases:
        lost = np.arange(length) % (2 * size) < size
        bounds = [length * each // size for each in range(size + 1)]
        own = slice(*bounds[rank : rank + 2])
        for reduction, found in (("min", 0), ("max", size - 1)):
            array = np.full(length, rank, dtype)
            array[rank :: 2 * size] = np.nan
            parts = array.copy()
            expected = np.where(lost, np.nan, np.dtype(dtype).type(found))
            transport.allreduce(array, reduction)
            np.testing.assert_array_equal(array, expected)
            transport.reduce_scatter(parts, bounds, reduction)
            np.testing.assert_array_equal(parts[own], expected[own])


def test_allreduce_gives_every_rank_the_same_bits(transport: Transport) -> None:
    for dtype, length in itertools.product((np.float16, np.float32, np.float64), (5, 1000)):
        rows = np.random.default_rng(length).standard_normal((transport.size, length)).astype(dtype)
        for reduction, expected in REDUCTIONS.items():
            array = rows[transport.rank].copy()
            transport.allreduce(array, reduction)
            digest = hashlib.sha256(array.tobytes()).digest()
            digests = transport.allgather(np.frombuffer(digest, np.uint8))
            assert {d.tobytes() for d in digests} == {digest}
            tolerance = 4 * transport.size * float(np.finfo(dtype).eps)
            scale = np.abs(rows.astype(float)).sum(axis=0) + REDUCTIONS["product"](
                np.abs(rows.astype(float))
            )
            error = np.abs(array.astype(float) - expected(rows.astype(float)))
            assert (error <= tolerance * scale + 1e-7).all()


def test_bfloat16_is_reduced_in_float32_and_travels_in_two_bytes(transport: Transport) -> None:
    def words(values: np.ndarray) -> np.ndarray:
        return narrow(values.astype(np.float32), BFLOAT16)

    hops = rounds(transport.size)
    for length in lengths(transport):
        rows = np.random.default_rng(length).choice([-2, -1, 1, 2], (transport.size, length))
        for reduction, expected in REDUCTIONS.items():
            array, halves = words(rows[transport.rank]), rows[transport.rank].astype(np.float16)
            transport.traffic.read_and_reset()
            transport.allreduce(array, reduction)
            sent = transport.traffic.read_and_reset().sent_bytes
            reductions.allreduce(transport, halves, reduction)
            assert sent == transport.traffic.read_and_reset().sent_bytes
            assert widen(array).tolist() == expected(rows).tolist(), (reduction, length)
        far = np.random.default_rng(length).standard_normal((transport.size, length)) * 1e30
        array = words(far[transport.rank])
        transport.allreduce(array)
        gathered = transport.allgather(array.view(np.uint8))
        assert {message.tobytes() for message in gathered} == {array.tobytes()}
        exact = np.array([widen(words(row)) for row in far], np.float64)
        error = np.abs(widen(array) - exact.sum(axis=0))
        assert (error <= hops * 2.0**-8 * np.abs(exact).sum(axis=0)).all()
    for bounds in uneven_bounds(transport):
        rows = np.random.default_rng(bounds).choice([-2, -1, 1, 2], (transport.size, bounds[-1]))
        array = words(rows[transport.rank])
        transport.reduce_scatter(array, bounds)
        transport.allgather_into(array, bounds)
        assert widen(array).tolist() == rows.sum(axis=0).tolist()


def test_sent_bytes_are_counted_exactly(transport: Transport) -> None:
    transport.traffic.read_and_reset()
    waits = [transport.send(message(size), peer) for peer in others(transport) for size in SIZES]
    for peer in others(transport):
        for _ in SIZES:
            transport.receive(peer)
    for wait in waits:
        wait()
    counted = transport.traffic.read_and_reset()
    assert counted.sent_bytes == sum(SIZES) * (transport.size - 1)
    assert counted.sent_messages == len(SIZES) * (transport.size - 1)
    assert transport.traffic.read_and_reset().sent_messages == 0
    assert transport.traffic.sent_bytes == 0


def test_broadcast_sends_one_message_for_each_other_rank(transport: Transport) -> None:
    for root in range(transport.size):
        transport.traffic.read_and_reset()
        transport.broadcast(message(100), root)
        counted = transport.traffic.read_and_reset()
        together = np.array([counted.sent_bytes, counted.sent_messages])
        transport.allreduce(together)
        assert together.tolist() == [100 * (transport.size - 1), transport.size - 1]


def test_barrier_sends_log_2_messages_a_rank(transport: Transport) -> None:
    transport.traffic.read_and_reset()
    transport.barrier()
    counted = transport.traffic.read_and_reset()
    rounds = (transport.size - 1).bit_length()
    assert counted.sent_messages == rounds
    assert counted.sent_bytes == 8 * rounds + 8 * (transport.size - 1)


def test_large_allreduce_counts_bandwidth_optimal_bytes(transport: Transport) -> None:
    for dtype, length in zip((*DTYPES, BFLOAT16), 2 * (2049, 4096, 6007), strict=True):
        transport.traffic.read_and_reset()
        transport.allreduce(np.zeros(length, dtype))
        counted = transport.traffic.read_and_reset()
        # A long message of ours is followed by its checksum, of 8 bytes.
        checksums = counted.sent_messages - 2 * rounds(transport.size)
        assert 0 <= checksums <= 2 * rounds(transport.size)
        together = np.array([counted.sent_bytes - 8 * checksums])
        transport.allreduce(together)
        exact = 2 * (transport.size - 1) * length * np.dtype(dtype).itemsize
        # Computed by formula; every rank rounds its share to whole bytes.
        leeway = 0 if transport.counts_allreduce else transport.size / 2
        assert abs(int(together[0]) - exact) <= leeway


def test_small_allreduce_takes_one_message_a_round(
    transport: Transport,
) -> None:
    if not transport.counts_allreduce:
        return
    transport.traffic.read_and_reset()
    transport.allreduce(np.zeros(3, np.float64))
    counted = transport.traffic.read_and_reset()
    assert counted.sent_messages == rounds(transport.size)
    assert counted.sent_bytes == 24 * (transport.size - 1)


def test_reduce_scatter_reduces_each_part_on_its_owner(transport: Transport) -> None:
    for dtype, bounds in itertools.product(DTYPES, uneven_bounds(transport)):
        length = bounds[-1]
        rows = np.random.default_rng(length).choice([-2, -1, 1, 2], (transport.size, length))
        own_part = slice(bounds[transport.rank], bounds[transport.rank + 1])
        for reduction, expected in REDUCTIONS.items():
            array = rows[transport.rank].astype(dtype)
            transport.reduce_scatter(array, bounds, reduction)
            assert array[own_part].tolist() == expected(rows)[own_part].tolist(), (dtype, reduction)


def test_allgather_into_fills_in_every_ranks_part(transport: Transport) -> None:
    for dtype, bounds in itertools.product(DTYPES, uneven_bounds(transport)):
        whole = np.arange(bounds[-1]).astype(dtype)
        array = np.full_like(whole, 7)
        own_part = slice(bounds[transport.rank], bounds[transport.rank + 1])
        array[own_part] = whole[own_part]
        transport.traffic.read_and_reset()
        transport.allgather_into(array, bounds)
        assert array.tolist() == whole.tolist()
        assert transport.traffic.read_and_reset().sent_messages == rounds(transport.size)


def test_broadcast_into_fills_the_array_with_the_roots(transport: Transport) -> None:
    for root, dtype in itertools.product({0, transport.size - 1}, DTYPES):
        for length in lengths(transport):
            array = np.arange(length).astype(dtype) + dtype(transport.rank)
            transport.broadcast_into(array, root)
            assert array.tolist() == (np.arange(length).astype(dtype) + dtype(root)).tolist()


def test_alltoall_returns_each_ranks_part_by_source(transport: Transport) -> None:
    size, rank = transport.size, transport.rank
    for dtype, most in itertools.product((np.uint8, np.float64), (0, 1, 40)):
        # From rank r to rank s: (r + s) % (most + 1) numbers, which begin at 10 r + s.
        sizes = [(rank + to) % (most + 1) for to in range(size)]
        parts = [10 * rank + to + np.arange(length) for to, length in enumerate(sizes)]
        bounds = [0, *itertools.accumulate(sizes)]
        received, ends = transport.alltoall(np.concatenate(parts).astype(dtype), bounds)
        assert received.dtype == dtype
        assert ends == [0, *itertools.accumulate((s + rank) % (most + 1) for s in range(size))]
        for source in range(size):
            length = (source + rank) % (most + 1)
            expected = (10 * source + rank + np.arange(length)).astype(dtype)
            assert received[ends[source] : ends[source + 1]].tolist() == expected.tolist()


def test_allgather_into_and_reduce_scatter_leave_other_data_alone(transport: Transport) -> None:
    size, rank = transport.size, transport.rank
    for dtype, first in itertools.product(DTYPES, (0, 1)):
        bounds = range(first, first + 2 * size + 1, 2)
        parts, own_part = slice(bounds[0], bounds[-1]), slice(bounds[rank], bounds[rank + 1])
        array = np.full(bounds[-1] + 3, 20 + rank, dtype)
        expected = array.copy()
        expected[parts] = np.repeat(np.arange(size), 2)
        array[own_part] = rank
        transport.traffic.read_and_reset()
        transport.allgather_into(array, bounds)
        assert array.tolist() == expected.tolist()
        assert transport.traffic.read_and_reset().sent_bytes == (size - 1) * 2 * array.itemsize
        transport.reduce_scatter(array, bounds)
        assert array[own_part].tolist() == [size * rank] * 2
        array[parts] = expected[parts]
        assert array.tolist() == expected.tolist()


def uneven_bounds(transport: Transport) -> list[list[int]]:
    """Return the ends of parts: all empty; growing with the rank; and one that holds everything."""
    size = transport.size
    return [
        [0] * (size + 1),
        [rank * (rank + 1) // 2 for rank in range(size + 1)],
        [0] * (size // 2 + 1) + [11] * (size - size // 2),
    ]


# ---- views


def together(*programs: Callable[[], object]) -> None:
    """Run programs at the same time, each in its own thread; raise any error of theirs."""
    errors: list[BaseException] = []

    def run(program: Callable[[], object]) -> None:
        try:
            program()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(program,)) for program in programs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def all_operations(transport: Transport) -> None:
    """Check each operation briefly; sums show which members took part."""
    members = list(transport.ranks)
    own = np.array([members[transport.rank]]).view(np.uint8)
    assert [int(m.view(np.int64)[0]) for m in transport.allgather(own)] == members
    for root in range(transport.size):
        assert transport.broadcast(own, root).view(np.int64)[0] == members[root]
    for length in (1, 3000):
        array = np.full(length, members[transport.rank] + 1.0)
        transport.allreduce(array)
        assert set(array) == {sum(members) + len(members)}
    transport.barrier()


def test_subset_is_a_world_of_its_members_in_the_given_order(transport: Transport) -> None:
    parity = [rank for rank in range(transport.size) if rank % 2 == transport.rank % 2]
    for members in (parity, parity[::-1], list(range(transport.size))[::-1]):
        subset = transport.subset(members)
        assert (subset.size, subset.rank) == (len(members), members.index(transport.rank))
        assert list(subset.ranks) == [transport.ranks[member] for member in members]
        assert subset.neighbours() == list(range(subset.size))
        assert (subset.name, subset.library()) == (transport.name, transport.library())
        all_operations(subset)


def test_subsets_and_channels_compose(transport: Transport) -> None:
    backwards = transport.subset(range(transport.size)[::-1])
    without_first = range(1, transport.size)
    if backwards.rank in without_first:
        inner = backwards.subset(without_first)
        assert list(inner.ranks) == list(range(transport.size))[::-1][1:]
        all_operations(inner)
        all_operations(inner.channel(3))
    all_operations(transport.channel(3).subset(range(transport.size)))
    assert transport.subset(range(transport.size)).channel(3) is (
        transport.subset(list(range(transport.size))).channel(3)
    )


def test_channels_may_be_used_by_concurrent_threads(transport: Transport) -> None:
    def program(number: int) -> None:
        channel = transport.channel(number)
        for size in (0, 300):
            peer = transport.size - 1 - transport.rank
            if peer != transport.rank:
                received = channel.exchange(message(size, number, transport.rank), peer)
                assert received.tobytes() == message(size, number, peer).tobytes()
            all_operations(channel)

    together(*(partial(program, number) for number in range(4)), partial(all_operations, transport))


def test_channels_receive_their_messages_in_any_order(
    transport: Transport,
) -> None:
    # All are sent before the first is received, and received in another order.
    streams = [
        transport,
        transport.channel(0),
        transport.channel(1),
        transport.channel(0).channel(1),
    ]
    peer = transport.size - 1 - transport.rank
    if peer == transport.rank:
        return
    waits = [s.send(message(50, j, transport.rank), peer) for j, s in enumerate(streams)]
    for j, stream in reversed(list(enumerate(streams))):
        assert stream.receive(peer).tobytes() == message(50, j, peer).tobytes()
    for wait in waits:
        wait()


def test_subsets_that_share_members_do_not_mix_their_messages(transport: Transport) -> None:
    size, rank = transport.size, transport.rank
    pairs = [(a, b) for a, b in itertools.combinations(range(min(size, 5)), 2) if rank in (a, b)]

    def swap(pair: tuple[int, int]) -> None:
        subset = transport.subset(pair)
        for turn in range(5):
            received = subset.exchange(message(40 + turn, *pair, rank), 1 - subset.rank)
            peer = sum(pair) - rank
            assert received.tobytes() == message(40 + turn, *pair, peer).tobytes()

    together(*(partial(swap, pair) for pair in pairs))


def test_traffic_of_channels_and_subsets_counts_for_the_parent(transport: Transport) -> None:
    channel = transport.channel(5)
    subset = channel.subset(range(transport.size))
    for view in (transport, channel, subset):
        view.traffic.read_and_reset()
    subset.barrier()
    own = subset.traffic.read_and_reset()
    assert own.sent_messages == rounds(transport.size)
    channel.barrier()
    assert channel.traffic.read_and_reset().sent_messages == 2 * own.sent_messages
    assert transport.traffic.read_and_reset().sent_bytes == 2 * own.sent_bytes
    assert subset.traffic.read_and_reset().sent_messages == 0


def test_messages_longer_than_a_mebibyte_arrive(transport: Transport) -> None:
    peer = transport.size - 1 - transport.rank
    if peer != transport.rank:
        for stream in (transport, transport.channel(2)):
            received = stream.exchange(message((1 << 20) + 3, transport.rank), peer)
            assert received.tobytes() == message((1 << 20) + 3, peer).tobytes()


def test_barrier_holds_every_rank_until_all_have_come(transport: Transport) -> None:
    for late in range(transport.size):
        if transport.rank == late:
            time.sleep(0.005)
        came = time.monotonic()
        transport.barrier()
        went = time.monotonic()
        times = [np.frombuffer(m.tobytes()) for m in transport.allgather(_bytes(came, went))]
        assert max(came for came, _ in times) <= min(went for _, went in times)


def _bytes(*numbers: float) -> np.ndarray:
    return np.array(numbers).view(np.uint8)


def test_ranks_of_one_host_are_neighbours(transport: Transport) -> None:
    assert transport.neighbours() == list(range(transport.size))


def test_shared_counter_adds_each_amount_once(transport: Transport) -> None:
    streams = [transport, transport.channel(4), transport.subset([transport.rank])]
    if transport.name == "horovod":
        with pytest.raises(ValueError, match="no number that its ranks share"):
            streams[1].counter()
        return
    for stream in streams:
        counters = stream.counter(), stream.counter()  # independent
        amounts = [1 + (stream.rank + turn) % 3 for turn in range(20)]
        before = [counters[0].add(amount) for amount in amounts]
        assert before == sorted(before)
        stream.barrier()
        assert counters[1].add(0) == 0
        rows = stream.allgather(np.array([before, amounts]).reshape(-1).view(np.uint8))
        parts = [row.view(np.int64).reshape(2, -1).T.tolist() for row in rows]
        position = 0
        for first, amount in sorted(itertools.chain.from_iterable(parts)):
            assert first == position
            position += amount
        assert counters[0].add(0) == position


def test_shared_memory_starts_as_zeros_seen_by_all_ranks(transport: Transport) -> None:
    backwards = transport.subset(list(reversed(range(transport.size))))
    for stream in (transport, transport.channel(4), backwards):
        memory, other = stream.shared_memory(8 * (stream.size + 1)), stream.shared_memory(0)
        assert (memory.place, memory.places) == (stream.rank, stream.size)
        numbers = memory.bytes.view(np.int64)
        assert not numbers.any()
        assert not other.bytes.size
        stream.barrier()
        numbers[stream.rank] = stream.rank + 1
        for _ in range(50):
            with memory.lock():  # additions of two ranks at the same time would get lost
                numbers[stream.size] += 1
        stream.barrier()
        assert numbers.tolist() == [*range(1, stream.size + 1), 50 * stream.size]
        assert all(memory.is_present(place) for place in range(stream.size))
        stream.barrier()


def test_early_writes_into_shared_memory_are_kept(transport: Transport) -> None:
    """The memory is large, so that the first rank may still be filling it with zeros."""
    for _ in range(3):
        memory = transport.shared_memory(64 << 20)
        memory.bytes[-1 - transport.rank] = 7
        transport.barrier()
        assert memory.bytes[-transport.size :].tolist() == [7] * transport.size
        transport.barrier()


def test_rank_that_drops_shared_memory_still_counts_as_present(transport: Transport) -> None:
    for stream in (transport, transport.channel(4)):
        memory = [stream.shared_memory(64), stream.shared_memory(64)]
        del memory[stream.rank % 2 :]
        stream.barrier()
        assert all(left.is_present(place) for left in memory for place in range(stream.size))
        stream.barrier()


def check_descriptors(transport: Transport) -> None:
    """Check that memory leaves no file open once nobody uses it."""

    def count() -> int:
        transport.barrier()
        return len(os.listdir("/proc/self/fd"))

    transport.shared_memory(64)
    before = count()
    for _ in range(5):
        transport.shared_memory(64)
    assert count() == before


def check_large_allreduce(transport: Transport, length: int) -> None:
    """Check the sum and the traffic count of an array that the library reduces."""
    transport.barrier()
    transport.traffic.read_and_reset()
    array = np.full(length, transport.rank + 1, np.float32)
    transport.allreduce(array)
    assert set(array.tolist()) == {sum(range(1, transport.size + 1))}
    counted = transport.traffic.read_and_reset()
    if transport.size > 1:
        transport.barrier()
    barrier = transport.traffic.read_and_reset()
    share = dense_bytes(length, transport.size)
    assert counted.sent_bytes == share + barrier.sent_bytes
    assert counted.sent_messages == 2 * rounds(transport.size) + barrier.sent_messages


def check_native(transport: Transport, is_native: bool) -> None:
    """Check that allreduces use our own messages exactly where the transport says so."""
    from unittest import mock

    from collectives.transports import transport as transports

    for stream in (transport, transport.channel(11)):
        native_bytes = stream.native_bytes()
        assert (native_bytes < sys.maxsize) == (is_native and stream is transport)
        for array_bytes in (1 << 14, 1 << 24):
            with mock.patch.object(transports.reductions, "allreduce") as by_messages:
                stream.allreduce(np.zeros(array_bytes // 4, np.float32))
            if stream.size > 1:
                assert by_messages.called == (array_bytes < native_bytes)


def check_swapped(transport: Transport) -> None:
    """Check that two ranks reduce arrays from 1 MiB on, and no smaller ones, by our messages."""
    from unittest import mock

    from collectives.transports import transport as transports

    for array_bytes in (1 << 14, (1 << 20) - 4, 1 << 20, 1 << 24):
        with mock.patch.object(transports.reductions, "allreduce") as by_messages:
            transport.allreduce(np.zeros(array_bytes // 4, np.float32))
        assert by_messages.called == (array_bytes >= 1 << 20)


COUNTING = [test_large_allreduce_counts_bandwidth_optimal_bytes]
LARGE = [
    test_messages_longer_than_a_mebibyte_arrive,
    test_nan_of_any_rank_is_the_minimum_and_the_maximum,
]
LAWS = [law for name, law in list(globals().items()) if name.startswith("test_")]


def check_torch_distributed(transport: Transport) -> None:

    for law in LAWS:
        law(transport)
    check_large_allreduce(transport, transport.native_bytes() // 4 + 1)
    check_native(transport, True)
    check_descriptors(transport)
    assert "gloo of torch" in transport.library()
    check_checked(transport)


def check_mpi(transport: Transport) -> None:
    """Run the laws on MPI, with its normal limits, and with limits so low that all paths run."""
    from unittest import mock

    from collectives import open_transport
    from collectives.transports import mpi

    blocking_from = mpi._BLOCKING_BYTES
    for piece_bytes, blocking_bytes in itertools.product(
        (mpi.PIECE_BYTES, 16), (blocking_from, 64)
    ):
        with mock.patch.multiple(mpi, PIECE_BYTES=piece_bytes, _BLOCKING_BYTES=blocking_bytes):
            for law in LAWS:
                other_count = law in COUNTING and blocking_bytes != blocking_from
                too_many_pieces = law in LARGE and piece_bytes == 16
                if not other_count and not too_many_pieces:
                    law(transport)
    check_descriptors(transport)
    if transport.size == 2:
        check_swapped(transport)
    else:
        check_large_allreduce(transport, blocking_from // 4 + 1)
        check_native(transport, True)
    with mock.patch.object(transport, "_reduces_itself", True):
        check_native(transport, False)
    piece_sizes = mpi.piece_sizes

    def between_hosts(same_host: bool) -> Iterator[int]:
        return piece_sizes(same_host=False)

    with (
        mock.patch.multiple(mpi, EAGER_BYTES=24, _EAGER_PIECES=2),
        mock.patch.multiple(mpi, _SMALL_BYTES=64, _BY_HAND_BYTES=64),
        mock.patch.object(mpi, "piece_sizes", between_hosts),
        mock.patch.object(transport, "_reduces_itself", True),
    ):
        for law in LAWS:
            law(transport)
        with mock.patch.multiple(reductions, PIECE_BYTES=96, LONG_BYTES=32):
            test_allreduce_reduces_every_dtype_exactly(transport)

    with mock.patch.object(transport, "_neighbours", [transport.rank]):  # a host per rank
        test_shared_counter_adds_each_amount_once(transport)

    assert "MPI" in transport.library()
    launched = f"{transport.size + 3}"
    with (
        mock.patch.dict(os.environ, dict.fromkeys(mpi.LAUNCHED_SIZES, launched)),
        pytest.raises(RuntimeError, match=f"started {launched} ranks but MPI sees"),
    ):
        open_transport("mpi")
    check_checked(transport)


def check_horovod(transport: Transport) -> None:
    for law in LAWS:
        law(transport)
    assert "Horovod" in transport.library()


def check_checked(transport: Transport) -> None:
    """Check messages with checksums, in a setting where the library would reduce all arrays."""
    from unittest import mock

    from collectives_checked import check_checked_messages

    from collectives.transports import torch_distributed

    with mock.patch.object(torch_distributed, "NATIVE_BYTES", 0):
        check_checked_messages(transport)


CHECKS = {
    "mpi": check_mpi,
    "torch.distributed": check_torch_distributed,
    "horovod": check_horovod,
}


def main(name: str) -> None:
    """Run the laws on the ranks of a transport."""
    from collectives_job import job

    from collectives import open_transport

    transport = open_transport(name, timeout_seconds=60)
    assert transport.name == name
    with job(transport):
        CHECKS[name](transport)
    print(f"rank {transport.rank} of {transport.size}: {len(LAWS)} laws hold\n", end="", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

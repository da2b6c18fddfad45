"""A trace has every message of the real code once, with the counted bytes."""

from __future__ import annotations

import sys
import threading
from collections import Counter

import pytest

from collectives.transports.reductions import LONG_BYTES
from collectives.vector import SparseVector
from gtopk.cli.bench.collectives.cases import picks
from mpi_scripts.replay import traces
from mpi_scripts.replay.traces import RECEIVED, Reduction, profile_of, trace_of

ALGORITHMS = ("dense", "topk-allgather", "gtopk-tree", "gtopk", "oktopk", "hierarchical")


def reduction(algorithm: str, ranks: int, length: int = 40_000, selected: int = 400) -> Reduction:
    entries = length if algorithm == "dense" else selected
    return Reduction(algorithm, ranks, length, entries, 2 if algorithm == "hierarchical" else 1)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_trace_receives_every_message_that_is_sent(algorithm: str) -> None:
    for ranks in (1, 2, 3, 5, 8):
        trace = trace_of(reduction(algorithm, ranks))
        assert len(trace) == ranks
        sent = Counter((r, peer) for r, rank in enumerate(trace) for peer, n in rank if n >= 0)
        heard = Counter((peer, r) for r, rank in enumerate(trace) for peer, n in rank if n < 0)
        assert sent == heard
        if algorithm != "hierarchical":  # its count assumes full nodes
            assert sum(sent.values()) == reduction(algorithm, ranks).messages


def test_failed_trace_restores_switch_interval_and_stack_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While threads act as ranks, they switch less often and have smaller stacks."""
    monkeypatch.setattr(traces, "picks", lambda *_, **__: 1 / 0)
    before = sys.getswitchinterval(), threading.stack_size()
    with pytest.raises(ZeroDivisionError):
        trace_of(reduction("gtopk", 2))
    assert (sys.getswitchinterval(), threading.stack_size()) == before


def test_trace_acknowledges_long_messages_and_omits_checksums() -> None:
    wanted = reduction("dense", 3, 400_000)
    trace = trace_of(wanted)
    sent = [size for events in trace for _, size in events if size > 0]
    assert len(sent) == wanted.messages
    assert min(sent) >= LONG_BYTES
    assert sum(size == 0 for events in trace for _, size in events) == len(sent)
    assert sum(map(len, trace)) == 4 * len(sent)
    # Distances 2 and 1 to reduce, then 1 and 2 to gather.
    *_, last = [trace[0][first : first + 4] for first in range(0, len(trace[0]), 4)]
    assert [(peer, size > 0) for peer, size in last] == [
        (1, True),
        (2, False),
        (2, False),
        (1, False),
    ]
    assert [size for _, size in last[1:]] == [RECEIVED, 0, RECEIVED]


def test_native_allreduce_trace_has_no_acknowledgements() -> None:
    wanted = reduction("dense", 3, 400_000)
    assert all(size for events in trace_of(wanted._replace(native_bytes=0)) for _, size in events)
    larger = wanted._replace(native_bytes=4 * wanted.length + 1)
    assert trace_of(larger) == trace_of(wanted)


@pytest.mark.parametrize(("ranks", "length"), [(40, 30), (64, 20)])
def test_empty_block_is_a_message_without_acknowledgement(ranks: int, length: int) -> None:
    wanted = reduction("dense", ranks, length)
    trace = trace_of(wanted)
    assert sum(size != RECEIVED for events in trace for _, size in events) == wanted.messages
    assert min(size for events in trace for _, size in events if size != RECEIVED) == 0


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
@pytest.mark.parametrize("block", [1, 2, 3])
def test_messages_as_short_as_a_checksum_stay_in_the_trace(ranks: int, block: int) -> None:
    """Every rank sends the others its own floats, or as many as all blocks but one of two have."""
    length = block * ranks
    gathers = 4 * length * (ranks - 1) <= 4096  # every rank gets all of them
    sent = sum(n for rank in trace_of(reduction("dense", ranks, length)) for _, n in rank if n > 0)
    assert sent == (ranks if gathers else 2) * 4 * length * (ranks - 1)


def test_trace_of_a_huge_vector_is_scaled_up_from_shorter_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A billion entries: 8 bytes for each one's position, and 4 for its value."""
    monkeypatch.setattr(traces, "_MOST_ENTRIES", 1 << 14)
    length = 10**12
    for algorithm in ("topk-allgather", "gtopk"):
        trace = trace_of(Reduction(algorithm, 2, length, length // 1000))
        ((sent, received),) = {tuple(size for _, size in events) for events in trace}
        assert received == RECEIVED
        assert sent == pytest.approx(12e9, rel=1e-6)


def test_recursive_doubling_exchanges_at_distances_1_2_4() -> None:
    for rank, events in enumerate(trace_of(reduction("gtopk", 8))):
        assert [peer for peer, _ in events] == [rank ^ d for d in (1, 1, 2, 2, 4, 4)]
        assert [size == RECEIVED for _, size in events] == [False, True] * 3


@pytest.mark.parametrize("algorithm", ["dense", "topk-allgather", "gtopk"])
def test_extrapolated_trace_matches_the_recorded_trace(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = reduction(algorithm, 4, 64_000, 640)
    recorded = trace_of(large)
    monkeypatch.setattr(traces, "_MOST_ENTRIES", large.entries // 4)
    scaled = trace_of(large)
    for one, other in zip(recorded, scaled, strict=True):
        assert [peer for peer, _ in one] == [peer for peer, _ in other]
        assert [size for _, size in one] == pytest.approx([size for _, size in other], rel=0.01)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16, 32])
def test_dense_trace_of_segmented_messages_has_all_bytes(ranks: int) -> None:
    """Every rank sends all blocks but its own twice: 102 MB of them in all."""
    length = 25_557_032
    for events in trace_of(reduction("dense", ranks, length)):
        sent = sum(size for _, size in events if size != RECEIVED)
        assert sent == pytest.approx(2 * (ranks - 1) / ranks * 4 * length, rel=1e-3)


def test_trace_with_too_many_messages_or_boundaries_is_refused() -> None:
    with pytest.raises(ValueError, match=r"oktopk on 4,096 ranks has about 1[67],"):
        trace_of(Reduction("oktopk", 4096, 1000, 10))
    with pytest.raises(ValueError, match="oktopk on 256 ranks has 67,108,864 quantile"):
        trace_of(Reduction("oktopk", 256, 1 << 20, 1 << 10))
    with pytest.raises(ValueError, match="gtopk on 1,000,000,000,000 ranks has more than 524,288"):
        trace_of(Reduction("gtopk", 10**12, 1000, 10))


@pytest.mark.parametrize("algorithm", ["topk-allgather", "gtopk", "hierarchical"])
def test_profile_of_a_huge_reduction_is_measured_on_a_smaller_one(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = reduction(algorithm, 4, 64_000, 640)
    monkeypatch.setattr(traces, "_MOST_ENTRIES", wanted.entries // 4)
    drawn: list[int] = []

    def noted(distribution: str, length: int, k: int, rank: int, seed: int) -> SparseVector:
        drawn.append(k)
        return picks(distribution, length, k, rank, seed)

    monkeypatch.setattr(traces, "picks", noted)
    profile = profile_of(wanted)
    assert max(drawn) == 640 // 4
    assert [len(seconds) for seconds in profile] == [len(events) + 1 for events in trace_of(wanted)]


def test_recording_a_trace_prints_no_stall_warning(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr("collectives.transports.carrier.STALL_WARNING_SECONDS", 0.0)
    trace_of(reduction("gtopk", 8))
    assert capsys.readouterr().err == ""

"""Workers of a device class share one smallest batch; the slow class's never exceeds the fast's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from collectives.transports import LocalTransport
from gtopk.adaptive.hogbatch.ledger import IS_FAST, WorkerTable
from gtopk.adaptive.hogbatch.sizes import ClassSizes, Sizer, Thresholds

DEFAULT = Thresholds(1, 64)


def sizers(threads: Callable[..., Any], adapts: bool, **given_sizes: Any) -> list[Sizer]:
    """Return the sizers of two slow and two fast workers."""

    def program(transport: LocalTransport) -> Sizer:
        memory = transport.shared_memory(WorkerTable.size_bytes(transport.size))
        kind = "slow" if transport.rank < 2 else "fast"
        class_sizes = ClassSizes(memory, WorkerTable(memory), kind)
        return Sizer(IS_FAST[kind], adapts, 2.0, given_sizes.get(kind), DEFAULT, class_sizes)

    found: list[Sizer] = threads(4, program)
    return found


def probe(sizer: Sizer, overhead: float) -> None:
    """Let a worker compute until it has determined its sizes."""
    while sizer.thresholds is None:
        size = sizer.next(0, [])
        sizer.note(size, overhead + size)


def test_first_probe_sets_smallest_batch_of_its_device_class(threads: Callable[..., Any]) -> None:
    one, other, *fast = sizers(threads, adapts=True)
    other.note(other.next(0, []), 1.0)  # it has begun
    probe(one, 10)
    assert one.thresholds == (16, 64)
    assert other.next(0, []) == 16
    assert other.thresholds == (16, 64)
    assert fast[0].thresholds is None


def test_later_probe_adopts_smallest_batch_of_first_probe(threads: Callable[..., Any]) -> None:
    one, other, *_ = sizers(threads, adapts=True)
    probed_sizes = [size for size in (1, 2, 4, 8, 16, 32, 64) for _ in range(3)]
    for size in probed_sizes[:-1]:
        other.note(size, 1.0)
    probe(one, 10)
    other.note(probed_sizes[-1], 1.0)  # alone, it would have 64
    assert one.thresholds == other.thresholds == (16, 64)


@pytest.mark.parametrize("fast_is_first", [True, False])
def test_probed_smallest_batch_of_slow_class_never_exceeds_probed_fast_one(
    threads: Callable[..., Any], fast_is_first: bool
) -> None:
    slow, _, fast, _ = sizers(threads, adapts=True)
    overheads = {fast: 3, slow: 30}
    for sizer in sorted(overheads, key=overheads.get, reverse=not fast_is_first):
        probe(sizer, overheads[sizer])
    assert slow.thresholds == fast.thresholds == ((8, 64) if fast_is_first else (64, 64))


def test_probed_smallest_batch_of_slow_class_never_exceeds_given_fast_one(
    threads: Callable[..., Any],
) -> None:
    slow, *_ = sizers(threads, adapts=False, fast=Thresholds(4, 4))
    probe(slow, 30)
    assert slow.thresholds == (4, 64)


def test_workers_use_sizes_given_for_their_class(threads: Callable[..., Any]) -> None:
    slow, *_, fast = sizers(threads, adapts=False, slow=Thresholds(32, 32), fast=Thresholds(4, 4))
    assert (slow.size, fast.size) == (32, 4)

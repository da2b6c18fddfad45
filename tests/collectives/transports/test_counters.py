"""Bytes and messages are counted once, and none is lost."""

from __future__ import annotations

import sys
import threading

import numpy as np

from collectives import SparseVector, reduce
from collectives.transports import Traffic, local_world
from tests.collectives.transports.kinds import MESSAGE


def test_concurrent_counts_are_not_lost() -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        total = Traffic()
        parts = [Traffic(parent=total) for _ in range(4)]
        counters = [
            threading.Thread(target=lambda p=p: [p.count(2, 1) for _ in range(2000)]) for p in parts
        ]
        for counter in counters:
            counter.start()
        for counter in counters:
            counter.join()
    finally:
        sys.setswitchinterval(interval)
    assert parts == [Traffic(4000, 2000)] * 4
    assert total == Traffic(16000, 8000)


def test_read_and_reset_returns_each_count_once() -> None:
    (transport,) = local_world(1)
    transport.send(MESSAGE, 0)()
    assert transport.traffic == Traffic(10, 1)
    assert transport.traffic.read_and_reset() == Traffic(10, 1)
    assert transport.traffic.read_and_reset() == Traffic(0, 0)


def test_single_rank_sends_nothing() -> None:
    (transport,) = local_world(1)
    array = np.ones(3)
    transport.allreduce(array)
    transport.barrier()
    assert transport.allgather(MESSAGE)[0].tobytes() == MESSAGE.tobytes()
    assert transport.broadcast(MESSAGE, 0).tobytes() == MESSAGE.tobytes()
    for algorithm in ("dense", "topk-allgather", "gtopk-tree", "gtopk"):
        reduce(SparseVector.from_dense(array), 3, transport, algorithm)
    assert transport.traffic == Traffic(0, 0)

"""Workers with fewer updates get smaller batches, between the thresholds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gtopk.adaptive.hogbatch.sizes import Sizer, Thresholds, next_size, thresholds_of

WIDE = Thresholds(1, 1024)


@pytest.mark.parametrize(
    ("updates", "others", "expected"),
    [
        (1, [2, 3], 32),  # fewer than all others
        (4, [2, 3], 128),  # more than all others
        (2, [2, 3], 64),
        (3, [2, 3], 64),
        (5, [], 64),  # alone
    ],
)
def test_next_size_depends_on_updates_relative_to_others(
    updates: int, others: list[float], expected: int
) -> None:
    assert next_size(64, updates, others, 2.0, WIDE) == expected


@given(
    size=st.integers(1, 2000),
    updates=st.integers(0, 50),
    others=st.lists(st.integers(0, 50), max_size=4),
    alpha=st.floats(1.01, 8),
    smallest=st.integers(1, 100),
    span=st.integers(0, 500),
)
def test_next_size_stays_within_thresholds(
    size: int, updates: int, others: list[int], alpha: float, smallest: int, span: int
) -> None:
    thresholds = Thresholds(smallest, smallest + span)
    found = next_size(size, updates, [float(n) for n in others], alpha, thresholds)
    assert smallest <= found <= smallest + span


def test_slow_workers_begin_small_and_fast_workers_large() -> None:
    thresholds, default = Thresholds(4, 64), Thresholds(1, 512)
    slow, fast = (Sizer(is_fast, True, 2.0, thresholds, default) for is_fast in (False, True))
    assert (slow.size, fast.size) == (4, 64)
    assert slow.next(10, [1]) == 8
    assert fast.next(1, [10]) == 32


def test_sizes_stay_fixed_without_adaptation() -> None:
    slow = Sizer(False, False, 2.0, Thresholds(4, 64), Thresholds(1, 512))
    assert slow.next(10, [1]) == slow.next(1, [10]) == 4


def test_missing_thresholds_are_probed_by_slow_and_largest_for_fast_workers() -> None:
    fast = Sizer(True, False, 2.0, None, Thresholds(1, 512))
    assert fast.thresholds == (512, 512)
    slow = Sizer(False, False, 2.0, None, Thresholds(1, 512))
    tried = []
    while slow.thresholds is None:
        size = slow.next(0, [])
        tried.append(size)
        slow.note(size, 10.0 + size)  # a batch's overhead equals ten samples
    assert tried == [1] * 3 + [2] * 3 + [4] * 3 + [8] * 3 + [16] * 3 + [32] * 6
    assert slow.thresholds == (16, 512)
    assert slow.next(0, []) == 16


def test_memory_limits_every_size() -> None:
    sizer = Sizer(True, True, 2.0, Thresholds(8, 64), Thresholds(1, 64))
    sizer.limit(20)
    assert sizer.size == 20
    assert sizer.next(9, [1]) == 20
    probing = Sizer(False, True, 2.0, None, Thresholds(4, 64))
    probing.limit(2)
    assert probing.next(0, []) == 2


def test_memory_estimate_does_not_limit_sizes_that_fitted() -> None:
    sizer = Sizer(True, True, 2.0, Thresholds(8, 64), Thresholds(1, 64))
    sizer.note_memory(64, took_bytes=640, free_bytes=650)
    assert sizer.size == 64
    sizer.note_memory(5, took_bytes=400, free_bytes=650)  # the last one of an epoch
    assert sizer.size == 64
    assert sizer.next(1, [9]) == 32
    sizer.note_memory(32, took_bytes=500, free_bytes=650)
    assert sizer.next(9, [1]) == 64


def test_memory_estimate_limits_untried_sizes() -> None:
    sizer = Sizer(False, True, 2.0, Thresholds(8, 64), Thresholds(1, 64))
    sizer.note_memory(8, took_bytes=80, free_bytes=250)
    sizes = [sizer.next(9, [1]) for _ in range(4)]
    assert sizes == [16, 20, 20, 20]


def test_sizes_accept_any_integer_type() -> None:
    sizes = {"cpu": [np.int64(4), 8], "gpu": np.int32(64)}
    assert thresholds_of(sizes) == {"cpu": (4, 8), "gpu": (64, 64)}


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tpu": 4}, "device class must be one of cpu, gpu, slow, fast, got 'tpu'"),
        ({"cpu": (64, 4)}, "thresholds of device class 'cpu' are crossed.*got 64 and 4"),
        ({"cpu": 0}, "must be at least 1, got 0"),
        ({"cpu": (1, 2, 3)}, "the smallest and the largest batch, or one for both"),
        ({"cpu": (1.5, 4)}, r"whole numbers, got \(1.5, 4\)"),
        ({"cpu": 2.5}, r"sizes\['cpu'\] must be .* whole numbers, got 2.5"),
        ({"cpu": "ab"}, "whole numbers, got 'ab'"),
        ({"cpu": True}, "whole numbers, got True"),
        ({"cpu": None}, "whole numbers, got None"),
        ([1, 2], r"sizes must map device classes to sizes, .* got \[1, 2\]"),
    ],
)
def test_invalid_sizes_raise(sizes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        thresholds_of(sizes)

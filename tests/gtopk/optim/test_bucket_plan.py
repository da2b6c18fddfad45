"""The plan puts every parameter in one bucket, in backward order, with small last buckets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gtopk.compression import Compression
from gtopk.optim.bucket_plan import (
    MOST_FULL_BUCKETS,
    ONE_BUCKET,
    Sizes,
    arrange,
    fill,
    sizes_for,
    split_evenly,
)


@given(data=st.data())
def test_arrange_puts_every_parameter_in_one_bucket_in_order(data):
    lengths = data.draw(st.lists(st.integers(0, 50), min_size=1, max_size=12))
    numbers = range(len(lengths))
    order = data.draw(st.permutations(numbers))
    least = data.draw(st.integers(1, 40))
    sizes = Sizes(least, least + data.draw(st.integers(0, 60)))
    chosen = st.sets(st.sampled_from(numbers))
    dense, sparse = data.draw(chosen), data.draw(chosen)
    groups = data.draw(
        st.one_of(
            st.integers(1, 5),
            st.lists(chosen, max_size=3).map(
                lambda sets: [sorted(s - set().union(*sets[:i])) for i, s in enumerate(sets)]
            ),
        )
    )
    buckets = arrange(order, lengths, sizes, groups=groups, dense=dense, sparse=sparse)
    assert sorted(n for bucket in buckets for n in bucket.numbers) == list(numbers)
    for bucket in buckets:
        if bucket.how == "sparse":
            assert len(bucket.numbers) == 1
            assert bucket.numbers[0] in sparse
        elif bucket.how == "dense":
            assert set(bucket.numbers) == dense - sparse
    place = {number: at for at, number in enumerate(order)}
    ends = [max(place[n] for n in bucket.numbers) for bucket in buckets]
    assert ends == sorted(ends)


def test_buckets_are_full_first_and_small_last():
    buckets = fill(range(64), [10] * 64, Sizes(20, 200))
    assert [10 * len(bucket) for bucket in buckets] == [200, 200, 120, 60, 30, 30]
    assert [n for bucket in buckets for n in bucket] == list(range(64))


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 60), st.integers(0, 100)
)
def test_each_bucket_has_the_least_size_or_follows_a_full_one(lengths, least, more):
    sizes = Sizes(least, least + more)
    buckets = fill(range(len(lengths)), lengths, sizes)
    totals = [sum(lengths[number] for number in bucket) for bucket in buckets]
    for total, before in zip(totals, [least - 1, *totals], strict=False):
        assert total >= least or before >= sizes.full or len(totals) == 1


def test_last_bucket_of_fixed_size_holds_the_rest():
    assert fill(range(5), [10] * 5, Sizes(20, 20)) == [[0, 1], [2, 3], [4]]


def test_small_gradients_of_two_ranks_share_one_dense_bucket():
    lengths = [1000] * 160
    assert len(fill(range(160), lengths, sizes_for(Compression.none, 160_000, ranks=2))) == 1


def test_parameters_too_small_for_two_buckets_share_one():
    assert fill([2, 0, 1], [5, 5, 5], Sizes(20, 200)) == [[2, 0, 1]]
    assert fill(range(100), [1000] * 100, ONE_BUCKET) == [list(range(100))]


@pytest.mark.parametrize("compression", [Compression.gtopk(0.001), Compression.auto(density=0.001)])
@pytest.mark.parametrize("count", [1, 2, 7, 161, 1000])
def test_gpu_plan_has_at_most_three_buckets(compression, count):
    lengths = [1_000_000 + 1000 * (number % 7) for number in range(count)]
    sizes = sizes_for(compression, sum(lengths), 16, on_gpu=True)
    buckets = fill(range(count), lengths, sizes)
    assert len(buckets) == (3 if count > 7 else 1)  # if the total justifies several
    by_host = sizes_for(compression, sum(lengths), 16)
    assert len(buckets) <= len(fill(range(count), lengths, by_host))


def test_bucket_sizes_fall_as_density_rises():
    sizes = [
        sizes_for(Compression.gtopk(density), 1, ranks=4) for density in (1e-3, 1e-2, 1e-1, 1.0)
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes_for(Compression.none, 1, ranks=4) < sizes[0]
    huge = 10**9
    assert sizes_for(Compression.none, huge, ranks=4).full >= huge / MOST_FULL_BUCKETS


def test_groups_differ_by_at_most_one_parameter():
    assert split_evenly([6, 0, 1, 5, 2, 3, 4], 3) == [[6, 0, 1], [5, 2], [3, 4]]
    assert split_evenly([0], 3) == [[0]]


def test_least_bucket_size_exceeds_the_cost_of_its_calls():
    for ranks in (2, 4, 8, 32):
        assert sizes_for(Compression.gtopk(0.001), 25_000_000, ranks).least > 50_000

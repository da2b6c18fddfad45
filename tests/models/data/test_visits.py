"""Every sample is visited in each epoch, by one rank, in an order that can be resumed anywhere."""

from __future__ import annotations

import pytest

from models.data.visits import Visits


def visited(samples: int, size: int, epoch: int, batch_size: int = 1) -> list[list[int]]:
    every = []
    for rank in range(size):
        visits = Visits(samples, batch_size, rank=rank, size=size, seed=5)
        visits.begin(epoch)
        every.append([number for batch in visits for number in batch])
    return every


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_ranks_together_visit_every_sample_of_an_epoch(size: int) -> None:
    samples = 17
    for epoch in (0, 3):
        by_rank = visited(samples, size, epoch)
        assert {len(own) for own in by_rank} == {-(-samples // size)}
        numbers = [number for own in by_rank for number in own]
        assert {number // samples for number in numbers} == {epoch}
        assert {number % samples for number in numbers} == set(range(samples))


def test_epoch_order_differs_between_epochs_and_is_reproducible() -> None:
    first, second = ([number % 17 for number in visited(17, 1, epoch)[0]] for epoch in (0, 1))
    assert first != second
    assert sorted(first) == sorted(second)
    assert visited(17, 1, 0) == visited(17, 1, 0)


def test_visits_drop_partial_batches_and_resume_at_any_batch() -> None:
    visits = Visits(23, 4, rank=1, size=2)
    batches = list(visits)
    assert [len(batch) for batch in batches] == [4] * len(visits) == [4, 4, 4]
    for first in range(4):
        visits.begin(0, first)
        assert list(visits) == batches[first:]

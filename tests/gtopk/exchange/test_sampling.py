"""Sampling covers all coordinates once per sweep, following a rule that needs no message."""

from __future__ import annotations

import pytest
import torch

from gtopk.exchange.sampling import SWEEP, Sampling, times_sampled

SIZES, ROWS = [7, 400, 1, 0, 40, 123 * 5], [1, 20, 1, 1, 1, 123]


def test_every_coordinate_is_sampled_once_per_sweep():
    sampling = Sampling(SIZES, ROWS)
    places = torch.cat([sampling.at([5 + step] * len(SIZES)).places for step in range(SWEEP)])
    assert places.sort().values.tolist() == list(range(sum(SIZES)))


@pytest.mark.parametrize("steps", [0, 41, 113])
def test_sample_has_the_parameter_and_row_of_each_place(steps):
    sample = Sampling(SIZES, ROWS).at([steps] * len(SIZES))
    numbers = torch.arange(len(SIZES)).repeat_interleave(torch.tensor(SIZES))
    rows, first = [], 0
    for size, many in zip(SIZES, ROWS, strict=True):
        rows += [first + place // (size // many) for place in range(size)]
        first += many
    assert sample.numbers.tolist() == numbers[sample.places].tolist()
    assert sample.rows.tolist() == torch.tensor(rows)[sample.places].tolist()
    assert (sample.places.diff() > 0).all()


def test_each_parameter_is_sampled_by_its_own_age():
    size = SWEEP + 20
    sampling = Sampling([size, size], [1, 1])
    both = sampling.at([3, 8])
    first, second = (both.places[both.numbers == number] for number in (0, 1))
    assert first.tolist() == [p for p in sampling.at([3, 3]).places.tolist() if p < size]
    assert second.tolist() == [p for p in sampling.at([8, 8]).places.tolist() if p >= size]


def test_sample_covers_more_than_half_of_a_matrix_columns():
    places = Sampling([SWEEP * SWEEP], [SWEEP]).at([0]).places
    assert len(set((places % SWEEP).tolist())) > SWEEP // 2


def test_times_sampled_counts_begun_sweeps():
    counted = [times_sampled(steps) for steps in (0, 1, SWEEP, SWEEP + 1, 2 * SWEEP)]
    assert counted == [0, 1, 1, 2, 2]

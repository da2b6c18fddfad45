"""Between mega-batches all ranks decide the same stretches, weights, sizes and remainders."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gtopk.adaptive.model_averaging.options import MegaBatches, MergingOptions
from gtopk.adaptive.model_averaging.weights import Report
from gtopk.adaptive.partitioning.cursor import by_speed, in_step


def mega_batches(ranks: int, first_size: int = 16, **options: object) -> MegaBatches:
    chosen = MergingOptions(ranks * first_size, **options)
    chosen.check()
    return MegaBatches(chosen, [first_size] * ranks)


def report(takes: list[range], size: int = 16, **fields: object) -> Report:
    return Report(size, len(takes), sum(map(len, takes)), takes=takes, **fields)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2000), st.integers(1, 5), st.sampled_from(["adaptive", "k-step", "crossbow"]))
def test_epoch_merges_every_sample_once(length: int, ranks: int, algorithm: str) -> None:
    batches = mega_batches(ranks, algorithm=algorithm, mega_batch=300)
    batches.begin([range(length)])
    merged, sizes = [], []
    hand_out = in_step if algorithm != "adaptive" else by_speed([1.0 + r for r in range(ranks)])
    while (stretch := batches.open()) is not None:
        takes = hand_out(batches.number, len(stretch), batches.sizes)
        sizes.append(len(stretch))
        places = [stretch.places(take) for take in chain.from_iterable(takes)]
        merged += list(chain.from_iterable(chain.from_iterable(places)))
        batches.close([report(each) for each in takes])
    assert sorted(merged) == list(range(length))
    if algorithm == "adaptive" and sizes:
        assert len(sizes) == max(1, round(length / 300))
        assert max(sizes) - min(sizes) <= len(sizes)  # no mega-batch is just a small remainder


def test_samples_of_lost_rank_are_handed_out_first_and_once() -> None:
    batches = mega_batches(3, mega_batch=200)
    batches.begin([range(400)])
    stretch = batches.open()
    assert stretch is not None
    takes = by_speed([1.0, 1.0, 1.0])(0, len(stretch), batches.sizes)
    lost = sorted(chain.from_iterable(takes[1]))
    batches.remove_rank(1)
    batches.close([report(takes[0]), report(takes[2])])
    assert list(chain.from_iterable(batches.left)) == [*lost, *range(200, 400)]
    following = batches.open()
    assert following is not None
    assert following.places(range(len(lost))) == batches.left[: len(takes[1])]
    assert len(batches.sizes) == 2


def test_nonfinite_replicas_get_no_weight_and_change_no_sizes() -> None:
    batches = mega_batches(3)
    batches.begin([range(480)])
    batches.open()
    reports = [
        Report(16, 20, 320),
        Report(16, 0, 0, finite=False),
        Report(16, 10, 160),
    ]
    assert batches.merge_weights(reports) == pytest.approx([2 / 3, 0.0, 1 / 3])
    batches.close(reports)
    assert batches.sizes == [16] * 3
    assert batches.merge_weights([each._replace(finite=False) for each in reports]) == [0.0] * 3


def test_elastic_strategies_divide_one_force_equally() -> None:
    reports = [Report(16, 8, 128)] * 4
    assert mega_batches(4, algorithm="elastic").merge_weights(reports) == [0.9 / 4] * 4
    assert mega_batches(4, algorithm="crossbow").merge_weights(reports) == [0.25] * 4
    assert mega_batches(4, algorithm="k-step").merge_weights(reports) == [0.25] * 4


def test_bounds_without_a_valid_size_raise() -> None:
    with pytest.raises(ValueError, match="rank 0's batches must be from 20 to 16 samples"):
        mega_batches(2, min_batch=20)
    with pytest.raises(ValueError, match="a multiple of the grain 32: there is no such size"):
        mega_batches(2, grain=32)


def test_checkpoint_holds_sizes_and_remaining_samples() -> None:
    batches = mega_batches(2, mega_batch=100)
    batches.begin([range(400)])
    stretch = batches.open()
    assert stretch is not None
    takes = by_speed([3.0, 1.0])(0, len(stretch), batches.sizes)
    batches.close([report(each) for each in takes])
    assert batches.sizes != [16, 16]
    for ranks in (2, 3):
        other = mega_batches(ranks, mega_batch=100)
        other.load_state_dict(batches.state_dict())
        assert other.left == batches.left == [range(100, 400)]
        assert other.sizes == (batches.sizes if ranks == 2 else [16] * 3)


def test_checkpoint_of_another_global_batch_keeps_requested_sizes() -> None:
    batches = mega_batches(2, mega_batch=100)
    batches.begin([range(100, 400)])
    other = mega_batches(2, first_size=24, mega_batch=100)
    other.load_state_dict(batches.state_dict())
    assert other.left == [range(100, 400)]
    assert other.sizes == [24, 24]
    state_without_global_batch = batches.state_dict()
    del state_without_global_batch["global_batch"]
    other.load_state_dict(state_without_global_batch)
    assert other.sizes == [16, 16]

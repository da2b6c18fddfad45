"""Every sample of an epoch is processed once, even if ranks come and go."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gtopk.torch.elastic import ElasticSampler, sampler


class World:
    """A fake world: `rank` of `size`."""

    rank, size = 0, 1


@pytest.fixture(autouse=True, scope="module")
def _world():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "rank", lambda: World.rank)
        patch.setattr(sampler, "size", lambda: World.size)
        yield
    World.rank, World.size = 0, 1


def make_samplers(size, state=None, **options):
    """Return the samplers of all ranks, resumed from a state."""
    samplers = []
    World.size = size
    for World.rank in range(size):
        samplers.append(ElasticSampler(**options))
        if state is not None:
            samplers[-1].load_state_dict(state)
    return samplers


def interleaved(shares):
    """Return the ranks' samples in the order of dealing; all have the same number."""
    return [sample for turn in zip(*shares, strict=True) for sample in turn]


def take(samplers, batches, batch):
    """Process some batches on every rank; return their samples and the new state."""
    taken = []
    iterators = [iter(each) for each in samplers]
    for index in range(batches):
        taken += interleaved([list(itertools.islice(iterator, batch)) for iterator in iterators])
        for each in samplers:
            each.record_batch(index, batch)
    assert len({tuple(each.state_dict().items()) for each in samplers}) == 1
    return taken, samplers[0].state_dict()


@given(
    length=st.integers(0, 60),
    phases=st.lists(st.tuples(st.integers(1, 7), st.integers(0, 3), st.integers(1, 4)), max_size=5),
    last=st.integers(1, 7),
    shuffle=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_every_sample_is_processed_once_over_any_change_of_the_ranks(
    length, phases, last, shuffle, epoch
):
    options = {"dataset": range(length), "shuffle": shuffle}
    state = {"epoch": epoch, "processed_num": 0}
    processed: list[int] = []
    for size, batches, batch in phases:
        taken, state = take(make_samplers(size, state, **options), batches, batch)
        processed += taken
    samplers = make_samplers(last, state, **options)
    shares = [list(each) for each in samplers]
    # All ranks take the same number of steps, which len() returns.
    assert {len(share) for share in shares} == {len(each) for each in samplers}
    assert len(set(map(len, shares))) == 1
    # Only the padding of the remainder, which comes last, repeats samples.
    processed += interleaved(shares)
    assert sorted(processed[:length]) == list(range(length))
    sizes = [last, *(size for size, *_ in phases)]
    assert len(processed) - length < max(sizes)


@given(length=st.integers(1, 50), size=st.integers(1, 9))
def test_padding_repeats_less_than_one_sample_per_rank(length, size):
    shares = [list(each) for each in make_samplers(size, dataset=range(length), shuffle=False)]
    samples = interleaved(shares)
    assert samples[:length] == list(range(length))
    assert len(samples) - length == -length % size
    assert set(samples) == set(range(length))


def test_order_of_samples_depends_on_epoch_and_seed_alone():
    options = {"dataset": range(100), "seed": 3}
    (first,) = make_samplers(1, {"epoch": 0, "processed_num": 0}, **options)
    (second,) = make_samplers(1, {"epoch": 1, "processed_num": 0}, **options)
    assert list(first) != list(second)
    assert list(first) == list(make_samplers(1, first.state_dict(), **options)[0])
    assert list(first) != list(make_samplers(1, dataset=range(100), seed=4)[0])
    assert list(first) != list(range(100))


def test_set_epoch_resets_the_processed_samples():
    (one,) = make_samplers(1, dataset=range(6))
    one.record_batch(0, 4)
    one.reset()
    assert len(one) == 2
    one.set_epoch(1)
    assert one.state_dict() == {"epoch": 1, "processed_num": 0}
    assert len(one) == 6


def test_record_batch_does_not_change_a_running_iteration():
    (one,) = make_samplers(1, dataset=range(6), shuffle=False)
    seen = []
    for index, sample in enumerate(one):
        seen.append(sample)
        one.record_batch(index, 1)
    assert seen == list(range(6))


def test_sampler_divides_samples_as_its_docstring_draws():
    order = re.search(r"order +((\d ?)+)", sampler.__doc__)[1].split()

    state = {"epoch": 0, "processed_num": 0}
    three = make_samplers(3, state, dataset=order, shuffle=False)
    shares = [[order[i] for i in itertools.islice(each, 2)] for each in three]
    _, state = take(three, 1, 2)
    rest = [
        [order[i] for i in each] for each in make_samplers(2, state, dataset=order, shuffle=False)
    ]
    drawn = [
        match.split() for match in re.findall(r"(?:rank )?\d(?: takes|:) (\d \d)", sampler.__doc__)
    ]
    assert drawn == shares + rest

"""The noise scale is unbiased for unequal batches; rates follow their formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gtopk.torch as hvd
from gtopk.adaptive.current_batch import FACTORS, LearningRate, adascale
from gtopk.adaptive.noise_scale import GradientCopy, Noise, NoiseAverage, estimate
from gtopk.runtime.world.membership import World
from tests.gtopk.adaptive.modelled_ranks import on_ranks


def test_noise_estimate_is_unbiased_for_unequal_batches(random: np.random.Generator) -> None:
    sizes, n = np.array([40, 10, 5, 1, 0]), 30
    spread = random.uniform(0.5, 3.0, n)
    mean = random.standard_normal(n) / 3
    variances, squares = [], []
    for _ in range(2000):
        gradients = [
            mean + spread * random.standard_normal(n) / np.sqrt(size) if size else np.zeros(n)
            for size in sizes
        ]
        weights = sizes / sizes.sum()
        together = sum(w * g for w, g in zip(weights, gradients, strict=True))
        weighted = sum(w * g @ g for w, g in zip(weights, gradients, strict=True))
        noise = estimate(float(weighted), float(together @ together), sizes.tolist())
        variances.append(noise.variance)
        squares.append(noise.square)
    for found, true in ((variances, spread @ spread), (squares, mean @ mean)):
        standard_error = np.std(found) / np.sqrt(len(found))
        assert abs(np.mean(found) - true) < 3 * standard_error


def test_noise_estimate_needs_two_ranks_with_samples() -> None:
    with pytest.raises(ValueError, match="two ranks with samples, got 1"):
        estimate(1.0, 1.0, [8, 0])


def test_noise_average_tracks_variance_and_square_and_survives_checkpoint() -> None:
    average, other = NoiseAverage(), NoiseAverage()
    assert average.value is None
    for variance in (1.0, 3.0):
        average.add(Noise(variance, 2.0))
    value = average.value
    assert value is not None
    assert 1.0 < value.variance < 3.0
    assert value.square == pytest.approx(2.0)
    assert value.scale == pytest.approx(value.variance / 2.0)
    other.load_state_dict(average.state_dict())
    assert other.value == value


@settings(deadline=None)
@given(st.floats(0.1, 16), st.floats(0, 1e3), st.floats(1e-3, 1e3))
def test_factors_are_one_at_reference_and_adascale_lies_between_one_and_linear(
    s: float, variance: float, square: float
) -> None:
    noise = Noise(variance, square)
    assert all(factor(1.0, noise, 64) == pytest.approx(1.0) for factor in FACTORS.values())
    low, high = sorted((1.0, s))
    assert low - 1e-9 <= adascale(s, noise, 64) <= high + 1e-9
    assert adascale(s, None, 64) == 1.0


def test_adascale_of_zero_gradients_keeps_the_rate() -> None:
    assert adascale(0.5, estimate(0.0, 0.0, [4, 4]), 8) == 1.0


@pytest.mark.parametrize(("scaling", "expected"), [("none", 1), ("linear", 4), ("sqrt", 2)])
def test_rate_is_scaled_only_during_the_step(scaling: str, expected: float) -> None:
    def program(here: World) -> float:
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.5))
        rate = LearningRate(optimizer, scaling, reference=64)
        rate.scale(256, None)
        parameter.grad = torch.ones(1)
        optimizer.step()
        assert optimizer.param_groups[0]["lr"] == 0.5
        return parameter.item()

    assert on_ranks(1, program) == [-0.5 * expected]


def test_gradient_copy_holds_one_backward_pass() -> None:
    layer = torch.nn.Linear(3, 2)
    unused = torch.nn.Parameter(torch.zeros(2))
    copy = GradientCopy([])
    layer(torch.ones(1, 3)).sum().backward()
    assert copy.disarm() is None
    for factor in (2.0, 3.0):
        copy.arm([*layer.parameters(), unused])
        layer(torch.full((1, 3), factor)).sum().backward()
        gradient = copy.disarm()
        assert gradient is not None
        assert gradient.tolist() == [factor] * 6 + [1.0] * 2 + [0.0] * 2


def test_gradient_copy_covers_every_parameter_ever_trained() -> None:
    """Regression: the copy was empty if a model was thawed only for its backward passes."""
    first, second = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    copy = GradientCopy([first])
    for trained, expected in (([], [2.0]), ([second], [2.0, 3.0]), ([first], [2.0, 3.0])):
        copy.arm(trained)
        (2 * first + 3 * second).sum().backward()
        gradient = copy.disarm()
        assert gradient is not None
        assert gradient.tolist() == expected
    copy.arm([])
    (2 * first).sum().backward()
    gradient = copy.disarm()
    assert gradient is not None
    assert gradient.tolist() == [2.0, 0.0]


def test_gradient_copy_holds_unscaled_dense_values() -> None:
    table = torch.nn.Embedding(3, 2, sparse=True)
    copy = GradientCopy([])
    copy.arm([table.weight], scale=8.0)
    (8.0 * table(torch.tensor([2, 0, 2])).sum()).backward()
    gradient = copy.disarm()
    assert gradient is not None
    assert gradient.tolist() == [1.0, 1.0, 0.0, 0.0, 2.0, 2.0]

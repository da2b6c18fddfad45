"""SyncBatchNorm equals BatchNorm on all ranks' rows together, also in gradients and statistics."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import gtopk.torch as hvd
from collectives.transports import LocalTransport, local_world
from gtopk.runtime.world import world

# Rows of each rank: equal, unequal, and none.
SPLITS = [[4], [3, 3], [5, 1], [0, 6], [2, 7, 1], [4, 0, 3], [1, 0, 0, 2, 6]]
SHAPES = [(3,), (3, 5), (3, 4, 2), (3, 2, 1, 4)]  # of a row, channels first
NORMS = [torch.nn.BatchNorm1d, torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d]
OPTIONS = [
    {},
    {"momentum": None},
    {"momentum": 0.3, "eps": 1e-3},
    {"affine": False},
    {"track_running_stats": False},
]


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return numbers with a mean far from 0, for which squares would cancel."""
    generator = torch.Generator().manual_seed(seed)
    return (50 + 3 * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)


def prepared(norm: Any, dtype: torch.dtype = torch.float64) -> Any:
    """Return the layer with different weights and biases per channel."""
    norm = norm.to(dtype)
    if norm.affine:
        with torch.no_grad():
            norm.weight.copy_(torch.arange(1, norm.num_features + 1))
            norm.bias.copy_(torch.arange(norm.num_features) - 1)
    return norm


def run_steps(
    norm: Any, inputs: Sequence[torch.Tensor], slopes: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the outputs and the gradients of the inputs of some steps."""
    seen = []
    for input, slope in zip(inputs, slopes, strict=True):
        input.requires_grad_()
        output = norm(input)
        assert output.dtype == input.dtype
        output.backward(slope)
        seen += [output.detach(), input.grad]
    return seen


def refuse(name: str, *arguments: Any, **options: Any) -> None:
    """Replace an engine's method that must not be called."""
    raise AssertionError(f"'{name}' was not to be exchanged")


def state(norm: torch.nn.Module) -> list[torch.Tensor]:
    return [buffer.double() for buffer in norm.buffers()]


@pytest.mark.parametrize("splits", SPLITS, ids=str)
def test_layer_equals_batch_norm_on_the_concatenated_batch(threads, splits):
    def program(transport: LocalTransport) -> list[Any]:
        rank, outcomes = transport.rank, []
        with world.entered(transport):
            for shape, options in itertools.product(SHAPES, OPTIONS):
                norm = prepared(hvd.SyncBatchNorm(3, **options))
                inputs, slopes = (
                    [normal(sum(splits), *shape, seed=step).split(splits)[rank] for step in steps]
                    for steps in (range(2), range(5, 7))
                )
                seen = run_steps(norm, [x.detach().clone() for x in inputs], slopes)
                gradients = [p.grad for p in norm.parameters()]
                outcomes.append((seen, gradients, state(norm)))
        return outcomes

    ranks = threads(len(splits), program)
    for case, (shape, options) in enumerate(itertools.product(SHAPES, OPTIONS)):
        norm = prepared(NORMS[len(shape) - 1](3, **options))
        inputs = [normal(sum(splits), *shape, seed=step) for step in range(2)]
        slopes = [normal(sum(splits), *shape, seed=step) for step in range(5, 7)]
        expected = run_steps(norm, inputs, slopes)
        outcomes = [rank[case] for rank in ranks]
        for place, tensor in enumerate(expected):
            together = torch.cat([seen[place] for seen, _, _ in outcomes])
            # The gradient of an input is a difference of slopes of 50 and more.
            torch.testing.assert_close(together, tensor, rtol=1e-12, atol=1e-11)
        for place, parameter in enumerate(norm.parameters()):
            gradient = sum(gradients[place] for _, gradients, _ in outcomes)
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-12, atol=1e-9)
        for _, _, buffers in outcomes:
            torch.testing.assert_close(buffers, state(norm), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_is_normalized_in_float32(threads, dtype):
    """As it is by BatchNorm of the same input, whose statistics are float32."""
    splits = [3, 2]
    make = {"shape": (5, 3, 4), "dtype": dtype}

    def input(seed: int) -> torch.Tensor:
        return normal(*make["shape"], seed=seed, dtype=make["dtype"])

    def program(transport: LocalTransport) -> Any:
        with world.entered(transport):
            norm = prepared(hvd.SyncBatchNorm(3), torch.float32)
            own = [input(seed).split(splits)[transport.rank].clone() for seed in (0, 1)]
            seen = run_steps(norm, own[:1], own[1:])
            return seen, [p.grad for p in norm.parameters()], state(norm)

    ranks = threads(2, program)
    norm = prepared(torch.nn.BatchNorm1d(3), torch.float32)
    wide = run_steps(norm, [input(0).float()], [input(1).float()])
    # Rounded to the input's type once, at the end; sums of float32 are off by a few units more.
    tolerance = {"rtol": torch.finfo(dtype).eps, "atol": 2e-4}
    for place, tensor in enumerate(wide):
        together = torch.cat([seen[place] for seen, _, _ in ranks])
        torch.testing.assert_close(together, tensor.to(dtype), **tolerance)
    for place, parameter in enumerate(norm.parameters()):
        assert ranks[0][1][place].dtype == torch.float32
        gradient = sum(gradients[place] for _, gradients, _ in ranks)
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-2)
    for _, _, buffers in ranks:
        torch.testing.assert_close(buffers, state(norm), rtol=1e-6, atol=1e-6)


def test_output_under_autocast_has_the_input_dtype(threads):
    def program(transport: LocalTransport) -> torch.Tensor:
        with world.entered(transport), torch.autocast("cpu", torch.bfloat16):
            layer = torch.nn.Linear(4, 3)
            output = hvd.SyncBatchNorm(3)(layer(torch.randn(6, 4)))
            output.float().square().sum().backward()
            assert layer.weight.grad.isfinite().all()
        return output

    assert [output.dtype for output in threads(2, program)] == [torch.bfloat16] * 2


def test_running_statistics_are_bit_identical_on_all_ranks(threads):
    def program(transport: LocalTransport) -> bytes:
        with world.entered(transport):
            norm = hvd.SyncBatchNorm(4)
            for step in range(3):
                norm(normal(5 + transport.rank, 4, 2, seed=10 * step + transport.rank).float())
        return b"".join(buffer.numpy().tobytes() for buffer in norm.buffers())

    assert len(set(threads(5, program))) == 1


def test_running_variance_is_exact_far_below_eps(threads):
    """Far below eps, where 1 / invstd^2 - eps is a difference of nearly equal numbers."""

    def program(transport: LocalTransport) -> float:
        with world.entered(transport):
            norm = hvd.SyncBatchNorm(1, momentum=1.0)
            norm(torch.tensor([[0.0], [1e-5]]))
        return norm.running_var.item()

    for variance in threads(2, program):
        assert variance == pytest.approx(1e-10 / 3, rel=1e-4)


def test_nothing_is_exchanged_in_eval_mode_or_on_one_rank(threads):
    input = normal(6, 3, seed=0)

    def program(transport: LocalTransport) -> torch.Tensor:
        with world.entered(transport) as here:
            here.engine.submit = refuse
            norm = prepared(hvd.SyncBatchNorm(3)).eval()
            output = norm(input[: 2 + transport.rank])  # of any number of rows on each rank
            untracked = hvd.SyncBatchNorm(3, track_running_stats=False).double().eval()
            untracked(input[: 2 + transport.rank])
        return output

    for rank, output in enumerate(threads(3, program)):
        expected = prepared(torch.nn.BatchNorm1d(3)).eval()(input[: 2 + rank])
        assert torch.equal(output, expected)

    with world.entered(local_world(1)[0]) as here:
        here.engine.submit = refuse
        alone = prepared(hvd.SyncBatchNorm(3, momentum=None))
        assert torch.equal(alone(input), prepared(torch.nn.BatchNorm1d(3))(input))
        assert alone.num_batches_tracked == 1


def test_backward_exchanges_nothing_for_an_input_without_gradient(threads):
    def program(transport: LocalTransport) -> torch.Tensor:
        with world.entered(transport) as here:
            norm = prepared(hvd.SyncBatchNorm(3))
            output = norm(normal(4, 3, seed=transport.rank))
            here.engine.submit = refuse
            output.sum().backward()
        return norm.bias.grad

    assert [gradient.tolist() for gradient in threads(2, program)] == [[4.0] * 3] * 2


@pytest.mark.parametrize("splits", [[1, 0], [0, 0]])
def test_fewer_than_two_rows_on_all_ranks_together_raise_on_each(threads, splits):
    def program(transport: LocalTransport) -> None:
        with world.entered(transport):
            norm = hvd.SyncBatchNorm(3)
            error = f"got {sum(splits)} on all ranks together"
            with pytest.raises(ValueError, match=error):
                norm(torch.ones(splits[transport.rank], 3))
            assert norm.num_batches_tracked == 0

    threads(2, program)


@pytest.mark.parametrize(
    ("shape", "error"), [((3,), "at least 2D input"), ((4, 2), "input of 3 channels")]
)
def test_input_of_wrong_shape_is_refused_before_anything_is_sent(threads, shape, error):
    def program(transport: LocalTransport) -> None:
        with world.entered(transport), pytest.raises(ValueError, match=error):
            hvd.SyncBatchNorm(3)(torch.ones(shape))

    threads(2, program)


def test_different_numbers_of_channels_raise_on_all_ranks(threads):
    def program(transport: LocalTransport) -> None:
        channels = 3 + transport.rank
        with (
            world.entered(transport),
            pytest.raises(hvd.HorovodInternalError, match=r"sync_batch_norm\.mean"),
        ):
            hvd.SyncBatchNorm(channels)(torch.ones(2, channels))

    threads(2, program)


def test_convert_keeps_parameters_and_statistics():
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 1),
        torch.nn.BatchNorm2d(4, eps=0.5, momentum=None),
        torch.nn.Sequential(torch.nn.BatchNorm1d(5, affine=False, track_running_stats=False)),
        torch.nn.ReLU(),
    )
    model[2].eval()
    parameters, buffers = list(model.parameters()), list(model.buffers())
    converted = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
    assert converted is model
    first, second = model[1], model[2][0]
    assert isinstance(first, hvd.SyncBatchNorm)
    assert (first.num_features, first.eps, first.momentum) == (4, 0.5, None)
    assert isinstance(second, hvd.SyncBatchNorm)
    assert (second.affine, second.track_running_stats) == (False, False)
    assert (first.training, second.training) == (True, False)
    for ours, theirs in [(model.parameters(), parameters), (model.buffers(), buffers)]:
        assert [id(tensor) for tensor in ours] == [id(tensor) for tensor in theirs]
    alone = hvd.SyncBatchNorm.convert_sync_batchnorm(torch.nn.BatchNorm1d(2))
    assert isinstance(alone, hvd.SyncBatchNorm)


def test_model_trains_equally_on_several_ranks_and_on_one(threads):
    """With the ranks' gradients added up, as the loss is a sum."""

    def model() -> torch.nn.Module:
        generator = torch.Generator().manual_seed(0)
        layers = torch.nn.Sequential(
            torch.nn.Conv2d(2, 3, 3),
            torch.nn.BatchNorm2d(3),
            torch.nn.ReLU(),
            torch.nn.Conv2d(3, 2, 2),
            torch.nn.BatchNorm2d(2),
        ).double()
        for parameter in layers.parameters():
            parameter.data.normal_(generator=generator)
        return layers

    def train(layers: torch.nn.Module, optimizer: Any, rows: slice) -> list[torch.Tensor]:
        for step in range(3):
            optimizer.zero_grad()
            input = (normal(7, 2, 6, 6, seed=step) - 50)[rows]
            (layers(input) * input[:, :, :3, :3]).sum().backward()
            optimizer.step()
        return [tensor.detach() for tensor in layers.state_dict().values()]

    def program(transport: LocalTransport) -> list[torch.Tensor]:
        layers = hvd.SyncBatchNorm.convert_sync_batchnorm(model())
        with world.entered(transport):
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(layers.parameters(), lr=1e-3), op=hvd.Sum
            )
            return train(layers, optimizer, [slice(0, 2), slice(2, 7), slice(7, 7)][transport.rank])

    alone = model()
    expected = train(alone, torch.optim.SGD(alone.parameters(), lr=1e-3), slice(None))
    for tensors in threads(3, program):
        torch.testing.assert_close(tensors, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("splits", [[2, 6], [7, 1, 3], [5, 0, 1]], ids=str)
def test_unequal_batches_train_like_one_batch_of_all_rows(threads, splits, reduction):
    """A rank without samples trains on a batch of NaN, which counts for nothing."""

    def model() -> torch.nn.Module:
        generator = torch.Generator().manual_seed(0)
        layers = torch.nn.Sequential(
            torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5), torch.nn.Tanh(), torch.nn.Linear(5, 1)
        ).double()
        for parameter in layers.parameters():
            parameter.data.normal_(generator=generator)
        return layers

    def rows(step: int) -> torch.Tensor:
        return normal(sum(splits), 4, seed=step) - 50

    def program(transport: LocalTransport) -> list[torch.Tensor]:
        layers = hvd.SyncBatchNorm.convert_sync_batchnorm(model())
        with world.entered(transport):
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layers.parameters(), lr=0.1))
            for step in range(3):
                own = rows(step).split(splits)[transport.rank]
                optimizer.set_num_samples(len(own), reduction)
                optimizer.zero_grad()
                losses = layers(own if len(own) else torch.full_like(rows(step), torch.nan)) ** 2
                (losses.mean() if reduction == "mean" else losses.sum()).backward()
                optimizer.step()
                assert not optimizer.last_step.skipped
        return [tensor.detach() for tensor in layers.state_dict().values()]

    alone = model()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        (alone(rows(step)) ** 2).mean().backward()
        optimizer.step()
    expected = list(alone.state_dict().values())
    for tensors in threads(len(splits), program):
        torch.testing.assert_close(tensors, expected, rtol=1e-9, atol=1e-9)


def test_num_samples_of_one_optimizer_do_not_weigh_another_model(threads):
    """For example a generator and its critic."""

    def program(transport: LocalTransport) -> torch.Tensor:
        input = (normal(8, 3, seed=0) - 50).split(4)[transport.rank].requires_grad_()
        weighted, unweighted = torch.nn.Linear(1, 1), prepared(hvd.SyncBatchNorm(3))
        with world.entered(transport):
            optimizers = [
                hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
                for model in (unweighted, weighted)
            ]
            optimizers[1].set_num_samples([5, 0][transport.rank])
            (unweighted(input) ** 3).mean().backward()
        return input.grad

    alone = (normal(8, 3, seed=0) - 50).requires_grad_()
    (prepared(torch.nn.BatchNorm1d(3))(alone) ** 3).mean().backward()
    gradients = torch.cat(threads(2, program))
    torch.testing.assert_close(gradients / 2, alone.grad, rtol=1e-9, atol=1e-12)

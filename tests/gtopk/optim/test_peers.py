"""A rank may join in the middle of a step, as if it had not begun the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import gtopk.torch as hvd
from collectives.transports import LocalTransport
from gtopk.compression import Compression
from gtopk.runtime.world import world
from tests.gtopk.four_layers import distribute, flat, inputs, layers
from tests.gtopk.held import held

STEPS = 6


class Stopped(Exception):
    """Raised in the middle of a backward pass."""


def stop(gradient: torch.Tensor) -> torch.Tensor:
    raise Stopped


def not_at_all(model: Any, optimizer: Any, loss: Callable[[], torch.Tensor]) -> None:
    """Join at the proper place."""


def after_backward(model: Any, optimizer: Any, loss: Callable[[], torch.Tensor]) -> None:
    loss().backward()


def once_others_are_in_it(model: Any, optimizer: Any, loss: Callable[[], torch.Tensor]) -> None:
    loss().backward()
    for handle in optimizer._handles.values():
        handle.wait()


def after_zero_grad(model: Any, optimizer: Any, loss: Callable[[], torch.Tensor]) -> None:
    loss().backward()
    optimizer.zero_grad()


def with_nan(model: Any, optimizer: Any, loss: Callable[[], torch.Tensor]) -> None:
    (loss() * float("nan")).backward()


def in_the_middle_of_backward(model: Any, optimizer: Any, loss: Callable[[], torch.Tensor]) -> None:
    hook = model[1].weight.register_hook(stop)
    with pytest.raises(Stopped):
        loss().backward()
    hook.remove()


def once_another_has_joined(model: Any, optimizer: Any, loss: Callable[[], torch.Tensor]) -> None:
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="still here").item() == hvd.size() - 1


def after_backward_once_another_has_joined(
    model: Any, optimizer: Any, loss: Callable[[], torch.Tensor]
) -> None:
    loss().backward()
    once_another_has_joined(model, optimizer, loss)


def train(
    transport: LocalTransport, left_by: dict[int, tuple[int, Any]], compression: Any, **options: Any
) -> list[bytes]:
    """Return parameters and the residual after all ranks have joined, and after further steps.

    left_by: by rank, its number of steps, and its part of the next one before it joins.
    """
    rank = transport.rank
    model = layers()
    seen = []

    def loss(step: int) -> torch.Tensor:
        return model(inputs(rank, step)).square().sum()

    with world.entered(transport):
        optimizer = distribute(model, compression, **options)

        def take_steps(steps: range) -> None:
            for step in steps:
                optimizer.zero_grad()
                loss(step).backward()
                assert step == 0 or optimizer._handles  # some buckets were submitted early
                optimizer.step()

        def look() -> None:
            parts = flat(model).numpy(), held(optimizer), held(optimizer, "velocity")
            seen.extend(part.tobytes() for part in parts)

        steps, leave = left_by.get(rank, (STEPS, not_at_all))
        take_steps(range(steps))
        optimizer.zero_grad()
        leave(model, optimizer, lambda: loss(STEPS))
        last = hvd.join()
        look()
        hvd.broadcast_parameters(model.state_dict(), last)
        take_steps(range(STEPS, STEPS + 2))
        look()
    return seen


@pytest.mark.parametrize(
    "leave",
    [
        after_backward,
        once_others_are_in_it,
        after_zero_grad,
        with_nan,
        in_the_middle_of_backward,
    ],
)
@pytest.mark.parametrize(
    "compression",
    [
        Compression.none,
        Compression.gtopk(0.3, momentum_correction=0.5),
        Compression.gtopk(0.3, adam_correction=(0.9, 0.99)),
        Compression.topk(0.3),
    ],
    ids=repr,
)
def test_step_a_rank_leaves_to_join_excludes_its_gradient(threads, caplog, compression, leave):
    def ends(leave: Any) -> list[list[bytes]]:
        return threads(3, lambda t: train(t, {1: (3, leave)}, compression))

    assert ends(leave) == ends(not_at_all)
    assert "without overlap" not in caplog.text


@pytest.mark.parametrize("last", [after_backward, in_the_middle_of_backward])
def test_all_ranks_may_join_in_the_middle_of_a_step(threads, last):
    def ends(*left_by: tuple[int, Any]) -> list[list[bytes]]:
        by_rank = dict(enumerate(left_by))
        return threads(3, lambda t: train(t, by_rank, Compression.gtopk(0.3)))

    joined_midway = ends((3, after_backward), (5, last), (5, after_backward))
    assert joined_midway == ends((3, not_at_all), (5, not_at_all), (5, not_at_all))
    alone = ends((3, not_at_all), (4, not_at_all), (5, last))
    assert alone == ends((3, not_at_all), (4, not_at_all), (5, not_at_all))


@pytest.mark.parametrize(
    "others", [once_another_has_joined, after_backward_once_another_has_joined]
)
def test_step_that_every_rank_leaves_to_join_is_undone(threads, others):
    """The whole step runs when all have joined; the last bucket, submitted before, comes first."""
    compression = Compression.gtopk(0.1, warmup_steps=2 * STEPS, dense="0.*")

    def ends(*leave: Any) -> list[list[bytes]]:
        left_by = {rank: (5, each) for rank, each in enumerate(leave)}
        return threads(3, lambda t: train(t, left_by, compression))

    joined_midway = ends(others, others, after_backward)
    assert joined_midway == ends(once_another_has_joined, once_another_has_joined, not_at_all)


def test_rank_may_join_between_the_steps_of_two_optimizers(threads):
    """For example a generator and its critic."""

    def program(transport: LocalTransport, backwards: int) -> Any:
        """backwards: how many of the two passes rank 1 does in its last step."""
        models = [layers(), layers()]
        with world.entered(transport):
            optimizers = [distribute(model) for model in models]
            for step in range(STEPS):
                leaves = transport.rank == 1 and step == 4
                for number, optimizer in enumerate(optimizers):
                    optimizer.zero_grad()
                    if number < backwards or not leaves:
                        models[number](inputs(transport.rank, step)).square().sum().backward()
                optimizers[0].step()
                if leaves:
                    break
                optimizers[1].step()
            hvd.join()
            return [flat(model).tolist() for model in models], [*map(list, map(held, optimizers))]

    joined_midway = threads(2, lambda t: program(t, backwards=2))
    assert joined_midway == threads(2, lambda t: program(t, backwards=1))


@pytest.mark.parametrize("count", [None, 10])
def test_joined_rank_has_no_gradient_whatever_its_last_sample_count(threads, count):
    """Adam's moments, which are of past gradients, stay and are used again later."""

    def program(transport: LocalTransport) -> list[list[float]]:
        parameter = torch.nn.Parameter(torch.zeros(4))
        compression = Compression.gtopk(1.0, adam_correction=(0.9, 0.999))
        history = []
        with world.entered(transport):
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD([parameter], lr=1.0), compression=compression
            )
            for step in range(STEPS):
                if (transport.rank, step) == (2, 3):
                    break
                optimizer.set_num_samples(count)
                parameter.grad = torch.full((4,), float(transport.rank == 2))
                optimizer.step()
                history.append(parameter.tolist())
            hvd.join()
        return history

    history = threads(3, program)[0]
    assert history[2][0] < 0
    assert history[STEPS - 1] == history[2]


@pytest.mark.parametrize(
    ("first", "then"),
    [
        pytest.param(None, (8, 0), id="only the others set samples"),
        pytest.param(8, (None, None), id="only the joined rank set samples"),
    ],
)
def test_joined_rank_follows_the_other_ranks_sample_counts(threads, first, then):
    """All ranks must agree on missing gradients, or one would be alone in a reduction."""

    def program(transport: LocalTransport) -> str:
        both = [torch.nn.Parameter(torch.zeros(4)) for _ in range(2)]
        message = ""
        with world.entered(transport):
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(both, lr=1.0),
                compression=Compression.gtopk(1.0),
                missing_gradients="error",
                check_every=0,
            )
            optimizer.set_num_samples(first)
            for parameter in both:
                parameter.grad = torch.ones(4)
            optimizer.step()
            if transport.rank < 2:
                optimizer.zero_grad()
                optimizer.set_num_samples(then[transport.rank])
                if transport.rank == 0:
                    both[1].grad = torch.ones(4)
                if then[transport.rank] != 0:
                    both[0].grad = torch.ones(4)
                try:
                    optimizer.step()
                except hvd.HorovodInternalError as error:
                    message = str(error)
            hvd.join()
        return message

    *messages, of_joined = threads(3, program)
    assert of_joined == ""
    if then == (8, 0):
        assert messages == ["", ""]
    else:
        assert all(
            "disagree about which parameters have a gradient" in message for message in messages
        )

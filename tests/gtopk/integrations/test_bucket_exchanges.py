"""The residual follows a parameter into any bucket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from collectives.transports import LocalTransport, local_world
from gtopk.compression import GTopK
from gtopk.exchange.adamw import SHARED, SHARED_ROWS, STEP
from gtopk.exchange.bucket_exchange import BucketExchange, attach_adam, open_bucket_exchange
from gtopk.exchange.exchange import Progress
from gtopk.exchange.residual import AGE, ROWS
from gtopk.integrations.adam import HookGroups
from gtopk.integrations.passes import BucketExchanges, PassTransaction, split

BETAS = (0.9, 0.99)
Parameters = Mapping[str, torch.nn.Parameter]


def some_parameters() -> Parameters:
    """Return parameters of different sizes, by name."""
    sizes = {"a": 5, "b": 3, "c": 4}
    return {name: torch.nn.Parameter(torch.zeros(n).double()) for name, n in sizes.items()}


class Hook:
    """A single rank that sends every entry of Adam's steps, bucket by bucket.

    optimizer: the Adam that makes the steps; None: adam_correction makes them.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None = None,
        transport: LocalTransport | None = None,
    ) -> None:
        self.bucket_exchanges = BucketExchanges(self._open_bucket_exchange)
        self._groups = None if optimizer is None else HookGroups(optimizer)
        self._transport = transport or local_world(1)[0]

    def _open_bucket_exchange(
        self, bucket: torch.nn.Parameter, parameters: Sequence[torch.Tensor]
    ) -> BucketExchange:
        compression = GTopK(1.0, adam_correction=None if self._groups else BETAS)
        bucket_exchange = open_bucket_exchange(
            "bucket", [bucket], ["bucket"], compression, Progress(), members=parameters
        )
        if self._groups is not None:
            attach_adam(bucket_exchange, compression, self._groups, self._transport.size)
        return bucket_exchange

    def exchange(self, parameters: Parameters, bucket: str) -> None:
        """Replace existing gradients with Adam's steps."""
        members = [parameters[name] for name in bucket]
        buffer = torch.cat([torch.zeros_like(p) if p.grad is None else p.grad for p in members])
        bucket_exchange = self.bucket_exchanges.bucket_exchange_of(members, buffer)
        bucket_exchange.parameters[0].grad = buffer
        bucket_exchange.capture_gradients(1.0 / self._transport.size, 1.0)
        step = PassTransaction()
        step.run(step.add(bucket_exchange), self._transport, [0] * self._transport.size)
        assert step.close()
        for parameter, part in zip(members, split(buffer, members), strict=True):
            if parameter.grad is not None:
                parameter.grad.copy_(part)


def give_gradients(parameters: Parameters, names: str, step: int) -> None:
    """Give only the named parameters a gradient, and train only these."""
    for name, parameter in parameters.items():
        generator = torch.Generator().manual_seed(100 * step + ord(name))
        gradient = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.grad = gradient if name in names else None
        parameter.requires_grad_(name in names)


def assert_steps_are_adams(
    buckets: Sequence[str], trained_layers: Sequence[str], *, saved_before: int | None = None
) -> None:
    """Train in these buckets, and compare each step with plain Adam."""
    for has_optimizer in (False, True):
        _assert_steps_are_adams(buckets, trained_layers, saved_before, has_optimizer)


def _assert_steps_are_adams(
    buckets: Sequence[str],
    trained_layers: Sequence[str],
    saved_before: int | None,
    has_optimizer: bool,
) -> None:
    hook_parameters, adam_parameters = some_parameters(), some_parameters()
    options = {"lr": 0.1, "betas": BETAS, "weight_decay": 0.1 if has_optimizer else 0.0}
    given = torch.optim.Adam(hook_parameters.values(), **options) if has_optimizer else None
    hook = Hook(given)
    sgd = torch.optim.SGD(hook_parameters.values(), lr=1.0 if has_optimizer else 0.1)
    adam = torch.optim.Adam(adam_parameters.values(), **options)
    for step, (bucket, names) in enumerate(zip(buckets, trained_layers, strict=True)):
        if step == saved_before:
            held = {
                p: hook.bucket_exchanges.residual_of(p, is_trained=True)
                for p in hook_parameters.values()
            }
            assert all(parts[AGE].shape == () for parts in held.values())
            hook = Hook(given)
            hook.bucket_exchanges.put_residuals(held)
        for parameters in (hook_parameters, adam_parameters):
            give_gradients(parameters, names, step)
        hook.exchange(hook_parameters, bucket)
        sgd.step()
        adam.step()
        for name in hook_parameters:
            torch.testing.assert_close(
                hook_parameters[name], adam_parameters[name], rtol=1e-9, atol=1e-12
            )


def test_adam_step_count_of_a_layer_survives_freezing() -> None:
    """The same holds for other layers, which train in the meantime."""
    assert_steps_are_adams(["abc"] * 9, ["abc"] * 4 + ["ac"] * 3 + ["abc"] * 2)


def test_layer_added_later_has_its_own_adam_step_count() -> None:
    assert_steps_are_adams(
        ["a"] * 5 + ["ab"] * 2 + ["cba"] * 2, ["a"] * 5 + ["ab"] * 2 + ["abc"] * 2
    )


@pytest.mark.parametrize("bucket", ["abc", "cab"])
def test_adam_step_counts_survive_saving_and_loading(bucket: str) -> None:
    steps = ["abc"] * 3 + ["ac"] * 2
    assert_steps_are_adams(["abc"] * 5 + [bucket] * 2, [*steps, "ac", "abc"], saved_before=5)


def test_adam_moments_do_not_depend_on_the_bucket_layout(threads: Any) -> None:
    def program(transport: LocalTransport, buckets: Sequence[Sequence[str]]) -> list[torch.Tensor]:
        parameters = some_parameters()
        optimizer = torch.optim.AdamW(parameters.values(), lr=0.1, betas=BETAS)
        hook = Hook(optimizer, transport)
        for step, of_step in enumerate(buckets):
            give_gradients(parameters, "abc", 10 * step + transport.rank)
            for bucket in of_step:
                hook.exchange(parameters, bucket)
        tensors = []
        for parameter in parameters.values():
            own = hook.bucket_exchanges.residual_of(parameter, is_trained=True)
            state = optimizer.state[parameter]
            tensors += [own[name] for name in ("first_moment", "second_moment", AGE, ROWS)]
            tensors += [state[name] for name in (STEP, SHARED, SHARED_ROWS)]
        return tensors

    one_bucket = threads(2, partial(program, buckets=[["abc"]] * 6))
    changed_buckets = threads(2, partial(program, buckets=[["abc"]] * 3 + [["ca", "b"]] * 3))
    for one, other in zip(one_bucket, changed_buckets, strict=True):
        assert all(map(torch.equal, one, other))
    assert all(map(torch.equal, one_bucket[0][5::7], one_bucket[1][5::7]))
    assert all(bool((shared >= 0).any()) for shared in one_bucket[0][5::7])


def test_replaced_buffers_memory_is_released() -> None:
    """As when DDP is created again around a model of one bucket."""
    parameters = some_parameters()
    bucket_exchanges = Hook().bucket_exchanges
    for _ in range(2):
        buffer = torch.zeros(12).double()
        one = bucket_exchanges.bucket_exchange_of([*parameters.values()], buffer)
        assert one.elements == 12
        held = one.parameters[0].untyped_storage()
        assert held.nbytes() == buffer.itemsize

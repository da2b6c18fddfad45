"""The laws of DistributedOptimizer, on ranks that are threads of this process."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.cost import dense_bytes, rounds
from collectives.transports import LocalTransport, local_world, run_ranks
from gtopk.compression import Compression
from gtopk.exchange.buckets import buckets
from gtopk.optim.distributed import DistributedOptimizer
from gtopk.reduce_ops import Adasum, Average, Sum
from gtopk.runtime.world import world
from tests.gtopk.held import held
from tests.gtopk.in_shards import _small_blocks, in_shards
from tests.gtopk.local_rounds import network, weights
from tests.matrix import some_of

__all__ = ["_small_blocks"]

SIZES = some_of([1, 2, 3, 5, 6, 7, 8], 3, 8)  # the algorithms' own tests run all of these
SPARSE = [Compression.topk, Compression.gtopk, Compression.oktopk, Compression.hierarchical]
# Further options; what rounding on the wire takes stays in the residual.
VARIANTS = [
    partial(Compression.topk, values="fp16", wire="raw"),
    partial(Compression.gtopk, values="int8", wire="packed"),
    partial(Compression.gtopk, growth=3.0, values="bf16"),
    partial(Compression.gtopk, growth=3.0, values="int2"),
    partial(Compression.topk, values="int3"),
    partial(Compression.oktopk, values="int4"),
    partial(Compression.oktopk, k_out=3.0, values="bf16"),
    partial(Compression.hierarchical, across="oktopk", values="int8"),
    partial(Compression.hierarchical, inside="dense"),
    in_shards,
]


@pytest.fixture(autouse=True, scope="module")
def _large_gradients(_small_blocks: None) -> Iterator[None]:
    """Read small gradients in place, as large ones are; other files test copies of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "_SMALL", 0)
        yield


def batch(rank: int, step: int, samples: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    return x, torch.randn(samples, 4, generator=generator, dtype=torch.float64)


def loss(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((model(x) - y) ** 2).mean()


def train(transport: LocalTransport, compression: Any, steps: int = 8, **options: Any) -> Any:
    """Train on this rank and return the parameters."""
    model = network()
    with world.entered(transport):
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3),
            model.named_parameters(),
            compression,
            **options,
        )
        for step in range(steps):
            optimizer.zero_grad()
            loss(model, *batch(transport.rank, step)).backward()
            optimizer.step()
    return weights(model)


def train_alone(ranks: int, steps: int = 8) -> torch.Tensor:
    """Train on the ranks' batches, concatenated."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    for step in range(steps):
        x, y = zip(*(batch(rank, step) for rank in range(ranks)), strict=True)
        optimizer.zero_grad()
        loss(model, torch.cat(x), torch.cat(y)).backward()
        optimizer.step()
    return weights(model)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "compression", [Compression.none, *(kind(density=1.0) for kind in SPARSE)], ids=repr
)
def test_density_1_equals_sgd_on_the_concatenated_batch(threads, size, compression):
    alone = train_alone(size)
    for parameters in threads(size, lambda transport: train(transport, compression)):
        torch.testing.assert_close(parameters, alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "compression",
    [
        Compression.none,
        Compression.fp16,
        Compression.bf16,
        *(kind(density=0.05) for kind in [*SPARSE, *VARIANTS]),
    ],
    ids=repr,
)
def test_replicas_are_bit_identical(threads, size, compression):
    digests = {
        hashlib.sha256(parameters.numpy().tobytes()).hexdigest()
        for parameters in threads(size, lambda transport: train(transport, compression))
    }
    assert len(digests) == 1


@pytest.mark.parametrize("kind", SPARSE)
def test_low_density_changes_the_parameters(threads, kind):
    (sparse, *_) = threads(4, lambda transport: train(transport, kind(density=0.05)))
    assert not torch.allclose(sparse, train_alone(4), rtol=1e-3)


@pytest.mark.parametrize("kind", [*SPARSE, *VARIANTS], ids=repr)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_gradient_mass_is_conserved_at_every_step(kind, momentum, data):
    size = data.draw(st.integers(1, 9), label="size")
    density = data.draw(st.floats(0.005, 1.0), label="density")
    seed = data.draw(st.integers(0, 1000), label="seed")

    def program(transport: LocalTransport) -> list[tuple[np.ndarray, ...]]:
        model = network(seed)
        steps = []
        with world.entered(transport):
            optimizer = DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1),
                model.named_parameters(),
                kind(density, momentum_correction=momentum),
            )
            for step in range(4):
                optimizer.zero_grad()
                loss(model, *batch(transport.rank, seed + step)).backward()
                gradient = np.concatenate([p.grad.numpy().ravel() for p in model.parameters()])
                before = held(optimizer)
                added = gradient / size
                if momentum:
                    added = momentum * held(optimizer, "velocity") + added
                optimizer.synchronize()
                update = np.concatenate([p.grad.numpy().ravel() for p in model.parameters()])
                with optimizer.skip_synchronize():
                    optimizer.step()
                steps.append((before, added, update, held(optimizer)))
        return steps

    for ranks in zip(*run_ranks(local_world(size, 30), program), strict=True):
        before, added, updates, after = (np.stack(column) for column in zip(*ranks, strict=True))
        assert (updates == updates[0]).all()
        scale = np.abs(before).max() + np.abs(added).max()
        np.testing.assert_allclose(
            updates[0] + after.sum(0), before.sum(0) + added.sum(0), rtol=0, atol=1e-12 * scale
        )


def test_update_has_k_entries_with_gtopk_and_up_to_k_per_rank_with_topk(threads):
    def last_step(transport: LocalTransport, compression: Any) -> Any:
        model = network()
        with world.entered(transport):
            optimizer = DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression
            )
            loss(model, *batch(transport.rank, 0)).backward()
            optimizer.step()
            return optimizer.last_step

    size, k = 4, round(103 * 0.05)
    for report in threads(size, lambda t: last_step(t, Compression.gtopk(0.05, growth=1.0))):
        assert (report.selected, report.updated) == (k, k)
    for report in threads(size, lambda t: last_step(t, Compression.gtopk(0.05))):
        assert report.selected == k
        assert k < report.updated <= 2 * k
    for report in threads(size, lambda t: last_step(t, Compression.topk(0.05))):
        assert report.selected == k
        assert k < report.updated <= k * size


def test_averaging_divides_gradients_before_the_residual(threads):
    """Averages are sums of gradients over P, from the first step to the last."""

    def one_step(transport: LocalTransport, op: int) -> Any:
        model = network()
        with world.entered(transport):
            optimizer = DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1),
                model.named_parameters(),
                Compression.gtopk(0.1),
                op=op,
            )
            loss(model, *batch(transport.rank, 0)).backward()
            optimizer.step()
            return held(optimizer)

    size = 4  # a power of two: dividing by it rounds nothing
    averaged = threads(size, lambda transport: one_step(transport, Average))
    summed = threads(size, lambda transport: one_step(transport, Sum))
    for mean, total in zip(averaged, summed, strict=True):
        np.testing.assert_array_equal(size * mean, total)


def test_gradients_of_several_backward_passes_are_added(threads):
    def program(transport: LocalTransport, passes: int) -> torch.Tensor:
        model = network()
        with world.entered(transport):
            optimizer = DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1),
                model.named_parameters(),
                backward_passes_per_step=passes,
            )
            for _ in range(passes):
                (loss(model, *batch(transport.rank, 0)) / passes).backward()
            optimizer.step()
        return weights(model)

    once, thrice = (threads(2, lambda t, n=n: program(t, n))[0] for n in (1, 3))
    torch.testing.assert_close(once, thrice, rtol=1e-12, atol=1e-12)


def test_clipping_between_synchronize_and_step_sees_the_reduced_gradient(threads):
    def program(transport: LocalTransport) -> torch.Tensor:
        model = network()
        with world.entered(transport):
            optimizer = DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters()
            )
            before = weights(model)
            loss(model, *batch(transport.rank, 0)).backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            with optimizer.skip_synchronize():
                optimizer.step()
        return weights(model) - before

    moves = threads(3, program)
    assert all(torch.equal(move, moves[0]) for move in moves)
    assert float(moves[0].norm()) == pytest.approx(0.01, rel=1e-4)


def test_step_after_synchronize_without_skip_synchronize_warns(threads):
    def program(transport: LocalTransport) -> None:
        model = network()
        with world.entered(transport):
            optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            loss(model, *batch(transport.rank, 0)).backward()
            optimizer.synchronize()
            with pytest.warns(UserWarning, match="skip_synchronize"):
                optimizer.step()

    threads(1, program)


def test_step_with_unreduced_gradients_warns(threads):
    """As in Horovod it steps, and there is no exchange in which the replicas are compared."""

    def program(transport: LocalTransport) -> torch.Tensor:
        model = network()
        with world.entered(transport):
            optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            loss(model, *batch(transport.rank, 0)).backward()
            with optimizer.skip_synchronize():
                optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    threads(1, program)  # one rank has no other to differ from
    message = r"rank \d steps with its own gradients.*call synchronize\(\) before"
    with pytest.warns(UserWarning, match=message):
        one, other = threads(2, program)
    assert not torch.equal(one, other)


def test_gradients_computed_in_a_closure_are_exchanged(threads):
    def program(transport: LocalTransport) -> torch.Tensor:
        model = network()
        with world.entered(transport):
            optimizer = DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
            )

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                value = loss(model, *batch(transport.rank, 0))
                value.backward()
                return value

            assert optimizer.step(closure).item() > 0
        return weights(model)

    first, second = threads(2, program)
    assert torch.equal(first, second)
    assert not torch.equal(first, weights(network()))


def test_wrapped_optimizer_keeps_its_type_state_and_scheduler():
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with world.entered(local_world(1)[0]):
        optimizer = DistributedOptimizer(inner, model.named_parameters())
        assert isinstance(optimizer, torch.optim.SGD)
        assert type(optimizer).__name__ == "SGD"
        assert optimizer.param_groups is inner.param_groups
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        loss(model, *batch(0, 0)).backward()
        optimizer.step()
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
        assert optimizer.state_dict()["state"]


def test_scheduler_made_before_wrapping_does_not_bypass_the_exchange(threads):
    def program(transport: LocalTransport) -> torch.Tensor:
        model = network()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.optim.lr_scheduler.StepLR(inner, 1)
        with world.entered(transport):
            optimizer = DistributedOptimizer(inner, model.named_parameters())
            loss(model, *batch(transport.rank, 0)).backward()
            optimizer.step()
        return weights(model)

    first, second = threads(2, program)
    assert torch.equal(first, second)


@pytest.mark.parametrize("op", [Average, Adasum])
def test_wrapping_leaves_gradients_as_they_are(threads, op):
    """Also for a CUDA graph, which continues to write into gradients from before."""

    def program(transport: LocalTransport) -> list[float]:
        parameter, other = (torch.nn.Parameter(torch.zeros(4)) for _ in "ab")
        memory = parameter.grad = torch.full((4,), 3.0)
        with world.entered(transport):
            optimizer = DistributedOptimizer(torch.optim.SGD([parameter, other], lr=1.0), op=op)
            assert parameter.grad is memory
            assert other.grad is None
            for _ in range(2):
                optimizer.step()
                memory.data.fill_(2.0)
        return parameter.tolist()

    assert threads(2, program) == [[-5.0] * 4] * 2


def test_adamw_replicas_stay_identical(threads):
    def program(transport: LocalTransport) -> torch.Tensor:
        model = network()
        with world.entered(transport):
            optimizer = DistributedOptimizer(
                torch.optim.AdamW(model.parameters()), compression=Compression.gtopk(0.1)
            )
            for step in range(5):
                optimizer.zero_grad()
                loss(model, *batch(transport.rank, step)).backward()
                optimizer.step()
        return weights(model)

    replicas = threads(3, program)
    assert all(torch.equal(replica, replicas[0]) for replica in replicas)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_gradients_keep_a_float32_residual(threads, dtype):
    def program(transport: LocalTransport) -> torch.Tensor:
        model = network().to(dtype)
        with world.entered(transport):
            optimizer = DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1), compression=Compression.gtopk(0.2)
            )
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, transport.rank + 1)
            optimizer.step()
            assert held(optimizer).dtype == np.float32
        return weights(model)

    first, second = threads(2, program)
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("is_masked", "sent", "velocity"),
    [
        (True, -8.0, 0.0),  # entry 0's velocity is cleared after each step: 4, then 4 again
        (False, -10.0, 6.0),  # 4, and then 0.5 * 4 + 4
    ],
)
def test_factor_masking_clears_the_velocity_of_sent_entries(is_masked, sent, velocity):
    """Entry 0 is sent in each step; entry 1's velocity goes on growing in the residual."""
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    compression = Compression.gtopk(0.5, momentum_correction=0.5, factor_masking=is_masked)
    with world.entered(local_world(1)[0]):
        optimizer = DistributedOptimizer(
            torch.optim.SGD([parameter], lr=1.0), compression=compression
        )
        for _ in range(2):
            parameter.grad = torch.tensor([4.0, 1.0], dtype=torch.float64)
            optimizer.step()
    assert parameter.tolist() == [sent, 0.0]
    # Entry 1: velocities 1 and 0.5 * 1 + 1 add up in the residual.
    assert held(optimizer).tolist() == [0.0, 2.5]
    assert held(optimizer, "velocity").tolist() == [velocity, 1.5]


@pytest.mark.parametrize("op", [Average, Adasum])
@pytest.mark.parametrize("frozen", [False, True])
def test_parameter_without_gradient_on_any_rank_is_not_stepped(threads, op, frozen):
    """As without gtopk: no weight decay, no momentum, no step."""

    def program(transport: LocalTransport) -> torch.Tensor:
        used, unused = (torch.nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in "ab")
        with world.entered(transport):
            optimizer = DistributedOptimizer(
                torch.optim.SGD([used, unused], lr=0.1, momentum=0.9, weight_decay=0.5), op=op
            )
            unused.requires_grad_(not frozen)
            for _ in range(3):
                used.sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert unused.grad is None
        return unused.detach()

    for unused in threads(2, program):
        assert torch.equal(unused, torch.ones(2, dtype=torch.float64))


def test_residual_of_a_parameter_waits_while_its_gradient_is_missing():
    first, second = (torch.nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in "ab")
    with world.entered(local_world(1)[0]):
        optimizer = DistributedOptimizer(
            torch.optim.SGD([first, second], lr=1.0), compression=Compression.gtopk(0.5)
        )
        first.grad, second.grad = torch.full_like(first, 5.0), torch.full_like(second, 3.0)
        optimizer.step()
        optimizer.zero_grad()
        first.grad = torch.full_like(first, 1.0)
        optimizer.step()
        assert (first.item(), second.item()) == (-6.0, 0.0)
        first.grad, second.grad = torch.full_like(first, 1.0), torch.zeros_like(second)
        optimizer.step()
    assert (first.item(), second.item()) == (-6.0, -3.0)


@pytest.mark.parametrize(
    "compression",
    [Compression.none, Compression.fp16, Compression.bf16, Compression.gtopk(1.0)],
    ids=repr,
)
def test_overflowing_sum_skips_the_step_and_clears_no_residual(threads, compression):
    largest = 6e4 if compression is Compression.fp16 else 3e38

    def program(transport: LocalTransport) -> torch.Tensor:
        parameter = torch.nn.Parameter(torch.zeros(3))
        with world.entered(transport):
            optimizer = DistributedOptimizer(
                torch.optim.SGD([parameter], lr=1.0), compression=compression, op=Sum
            )
            parameter.grad = torch.full_like(parameter, largest)
            optimizer.step()
            assert optimizer.last_step.skipped
            assert optimizer.skipped_steps == 1
            assert parameter.grad.isnan().all()
            np.testing.assert_array_equal(held(optimizer), np.float32(0))
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        return parameter.detach()

    for parameter in threads(2, program):
        assert torch.equal(parameter, torch.full((3,), -2.0))


@pytest.mark.parametrize("compression", [Compression.none, Compression.gtopk(1.0)], ids=repr)
def test_expanded_gradient_with_zero_stride_is_reduced(threads, compression):
    def program(transport: LocalTransport) -> torch.Tensor:
        parameter = torch.nn.Parameter(torch.zeros(5))
        with world.entered(transport):
            optimizer = DistributedOptimizer(
                torch.optim.SGD([parameter], lr=1.0), compression=compression
            )
            (parameter.grad,) = torch.autograd.grad(parameter.sum(), parameter)
            assert parameter.grad.stride() == (0,)
            optimizer.step()
        return parameter.detach()

    assert all(torch.equal(each, torch.full((5,), -1.0)) for each in threads(2, program))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_bf16_sends_half_the_bytes_and_rounds_once_per_hop(threads, size, dtype):
    length = 30_000

    def gradient(rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(rank)
        return 1e6 * torch.randn(length, generator=generator).to(dtype)  # beyond float16

    def program(transport: LocalTransport) -> tuple[torch.Tensor, int]:
        parameter = torch.nn.Parameter(torch.zeros(length, dtype=dtype))
        with world.entered(transport):
            optimizer = DistributedOptimizer(
                torch.optim.SGD([parameter], lr=1.0), compression=Compression.bf16, op=Sum
            )
            parameter.grad = gradient(transport.rank)
            optimizer.step()
            assert not optimizer.last_step.skipped
        return parameter.detach(), optimizer.last_step.sent_bytes

    results = threads(size, program)
    exact = torch.stack([gradient(rank).double() for rank in range(size)])
    # Rounding, to 16 bits and at each hop, changes a value by at most 2^-8 of it.
    bound = (2 + rounds(size)) * 2.0**-8 * exact.abs().sum(0)
    for parameter, sent_bytes in results:
        assert torch.equal(parameter, results[0][0])
        assert ((parameter.double() + exact.sum(0)).abs() <= bound).all()
        assert 0 <= sent_bytes - dense_bytes(length, size, 2) < 1000  # to agree, and checksums


def test_batch_dropped_between_backward_and_step_is_in_no_step(threads):
    def program(transport: LocalTransport, dropped: int) -> torch.Tensor:
        model = network()
        with world.entered(transport):
            optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            for step in range(1, 1 + dropped):
                loss(model, *batch(transport.rank, step)).backward()
                optimizer.zero_grad()
            loss(model, *batch(transport.rank, 0)).backward()
            optimizer.step()
        return weights(model)

    one, other = threads(2, partial(program, dropped=3))
    assert torch.equal(one, other)
    assert torch.equal(one, threads(2, partial(program, dropped=0))[0])
    assert not torch.equal(one, weights(network()))


@pytest.mark.parametrize("how", ["added", "unfrozen", "added after a load"])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_parameter_added_or_unfrozen_later_is_trained(threads, how, steps_before):
    size = 3

    def program(transport: LocalTransport) -> torch.Tensor:
        model = network()
        late = torch.nn.Parameter(
            torch.ones(2, dtype=torch.float64), requires_grad=how != "unfrozen"
        )
        with world.entered(transport):
            optimizer = DistributedOptimizer(
                torch.optim.SGD(
                    [*model.parameters()] + ([late] if how == "unfrozen" else []), lr=0.1
                ),
                compression=Compression.gtopk(1.0),
            )
            for step in range(steps_before + 2):
                optimizer.zero_grad()
                value = loss(model, *batch(transport.rank, step))
                if step == steps_before:
                    late.requires_grad_(True)
                    if how == "added after a load":
                        optimizer.load_state_dict(optimizer.state_dict())
                    if how != "unfrozen":
                        optimizer.add_param_group({"params": [late]})
                if step >= steps_before:
                    value = value + (late * (transport.rank + 1)).sum()
                value.backward()
                optimizer.step()
        return torch.cat([weights(model), late.detach()])

    replicas = threads(size, program)
    mean = sum(range(1, size + 1)) / size
    torch.testing.assert_close(replicas[0][-2:], torch.full_like(replicas[0][-2:], 1 - 0.2 * mean))
    assert all(torch.equal(replica, replicas[0]) for replica in replicas)


def test_scheduler_made_before_wrapping_works_after_load_state_dict():
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)
    with world.entered(local_world(1)[0]):
        optimizer = DistributedOptimizer(inner)
        optimizer.load_state_dict(optimizer.state_dict())
        loss(model, *batch(0, 0)).backward()
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


def test_wrapping_a_model_again_does_not_count_its_backward_passes_twice(threads):
    def program(transport: LocalTransport) -> None:
        model = network()
        with world.entered(transport):
            for _ in range(3):
                optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
                loss(model, *batch(transport.rank, 0)).backward()
                optimizer.step()

    threads(2, program)


def test_float64_parameter_makes_its_bucket_float64(threads):
    def program(transport: LocalTransport) -> float:
        wide = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        narrow = torch.nn.Parameter(torch.zeros(1))
        with world.entered(transport):
            optimizer = DistributedOptimizer(torch.optim.SGD([narrow, wide], lr=1.0))
            wide.grad, narrow.grad = torch.full_like(wide, 1 + 1e-10), torch.ones_like(narrow)
            optimizer.step()
        return wide.item()

    assert threads(2, program) == [-(1 + 1e-10)] * 2


def test_step_report_excludes_bytes_of_other_queued_operations(threads):
    def program(transport: LocalTransport) -> Any:
        model = network()
        with world.entered(transport) as here:
            optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            loss(model, *batch(transport.rank, 0)).backward()
            here.engine.submit("large", [], lambda t, all_flags: t.allreduce(np.zeros(2_000_000)))
            optimizer.step()
            return optimizer.last_step

    for report in threads(2, program):
        assert report.sent_bytes < 10_000

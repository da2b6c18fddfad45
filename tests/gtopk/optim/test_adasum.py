"""The Adasum optimizer: each rank's own step, combined; replicas that stay the same."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from collectives.transports import LocalTransport, local_world, run_ranks
from gtopk.compression import Compression, Compressor
from gtopk.errors import HorovodInternalError
from gtopk.exchange.buckets import buckets
from gtopk.optim.distributed import DistributedOptimizer
from gtopk.reduce_ops import Adasum
from gtopk.runtime.world import world
from models.data import load
from models.mlp import mlp
from tests.collectives.algorithms.adasum_tree import tree
from tests.gtopk.adamw import value as loss
from tests.gtopk.local_rounds import network, weights

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
}


class IntegerCompressor(Compressor):
    """A compressor that returns integers, which have no useful dot product."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor.int(), tensor.dtype


def distributed(parameters: Any, **options: Any) -> Any:
    """Return SGD at a learning rate of 1 by Adasum."""
    return DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), op=Adasum, **options)


def test_replicas_that_start_differently_are_warned_of(threads, caplog):
    def program(transport: LocalTransport) -> None:
        parameter = torch.nn.Parameter(torch.full((3,), float(transport.rank)))
        with world.entered(transport):
            optimizer = distributed([parameter])
            for _ in range(3):
                parameter.grad = torch.ones_like(parameter)
                optimizer.step()

    with caplog.at_level(logging.WARNING, "gtopk"):
        threads(2, program)
    assert sum("replicas are not the same" in text for text in caplog.messages) == 2


def train(transport: LocalTransport, make: Callable[..., Any], **options: Any) -> torch.Tensor:
    """Train on this rank for some steps and return the parameters."""
    model = network()
    of_rank = options.pop("of_rank", lambda rank: rank)
    with world.entered(transport):
        optimizer = DistributedOptimizer(
            make(model.parameters()), model.named_parameters(), op=Adasum, **options
        )
        for step in range(8):
            optimizer.zero_grad()
            loss(model, of_rank(transport.rank), step).backward()
            optimizer.step()
    return weights(model)


def train_by_definition(size: int, make: Callable[..., Any]) -> torch.Tensor:
    """Do the same, every rank's optimizer in turn, with deltas combined by the plain tree."""
    models = [network() for _ in range(size)]
    optimizers = [make(model.parameters()) for model in models]
    for step in range(8):
        before = [p.detach().clone() for p in models[0].parameters()]
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss(model, rank, step).backward()
            optimizer.step()
        with torch.no_grad():
            for *replicas, old in zip(*(m.parameters() for m in models), before, strict=True):
                delta = tree([(p - old).reshape(-1).numpy() for p in replicas])
                for p in replicas:
                    p.copy_(old + torch.from_numpy(delta).reshape(old.shape))
    return weights(models[0])


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_training_equals_the_adasum_tree_of_the_ranks_steps(threads, size, name):
    expected = train_by_definition(size, OPTIMIZERS[name])
    for parameters in threads(size, lambda transport: train(transport, OPTIMIZERS[name])):
        torch.testing.assert_close(parameters, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_ranks_with_equal_batches_train_as_one_rank(threads, size, name):
    (alone,) = threads(1, lambda t: train(t, OPTIMIZERS[name]))
    for parameters in threads(size, lambda t: train(t, OPTIMIZERS[name], of_rank=lambda rank: 0)):
        torch.testing.assert_close(parameters, alone, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("compression", [Compression.none, Compression.fp16, Compression.bf16])
@pytest.mark.parametrize("size", [2, 3, 6])
def test_replicas_are_bit_identical(threads, size, compression):
    def program(transport: LocalTransport) -> torch.Tensor:
        return train(transport, OPTIMIZERS["adam"], compression=compression)

    replicas = threads(size, program)
    assert len({replica.numpy().tobytes() for replica in replicas}) == 1
    assert not torch.equal(replicas[0], weights(network()))


def test_orthogonal_steps_of_the_ranks_are_added(threads):
    def program(transport: LocalTransport) -> list[float]:
        parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
        with world.entered(transport):
            optimizer = distributed([parameter])
            parameter.grad = torch.zeros_like(parameter)
            parameter.grad[transport.rank] = -1.0 - transport.rank
            optimizer.step()
        return parameter.tolist()

    assert threads(3, program) == [[1.0, 2.0, 3.0]] * 3


def test_each_tensor_is_combined_separately(threads):
    """Changes of the first tensor are orthogonal and add; the second's are equal and averaged."""

    def program(transport: LocalTransport) -> list[list[float]]:
        first, second = (torch.nn.Parameter(torch.zeros(2, dtype=torch.float64)) for _ in "ab")
        with world.entered(transport):
            optimizer = distributed([first, second])
            first.grad = torch.zeros_like(first)
            first.grad[transport.rank] = -1.0
            second.grad = torch.full_like(second, -4.0)
            optimizer.step()
        return [first.tolist(), second.tolist()]

    assert threads(2, program) == [[[1.0, 1.0], [4.0, 4.0]]] * 2


def test_parameters_of_mixed_dtypes_keep_their_dtypes(threads):
    dtypes = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float32]

    def program(transport: LocalTransport) -> list[torch.Tensor]:
        parameters = [torch.nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in dtypes]
        with world.entered(transport):
            optimizer = distributed(parameters)
            for place, parameter in enumerate(parameters):
                parameter.grad = torch.full_like(parameter, -1.0 - place)
            optimizer.step()
        return [parameter.detach() for parameter in parameters]

    for parameters in threads(2, program):
        assert [parameter.dtype for parameter in parameters] == dtypes
        assert [p.tolist() for p in parameters] == [[1.0 + place] * 2 for place in range(5)]


def test_gradients_of_several_backward_passes_are_added(threads):
    def program(transport: LocalTransport, passes: int) -> torch.Tensor:
        model = network()
        with world.entered(transport):
            optimizer = distributed(model.parameters(), backward_passes_per_step=passes)
            for _ in range(2):
                optimizer.zero_grad()
                for _ in range(passes):
                    (loss(model, transport.rank, 0) / passes).backward()
                optimizer.step()
        return weights(model)

    once, thrice = (threads(2, lambda t, n=n: program(t, n))[0] for n in (1, 3))
    torch.testing.assert_close(once, thrice, rtol=1e-11, atol=1e-11)


def test_backward_pass_beyond_backward_passes_per_step_raises(threads):
    def program(transport: LocalTransport) -> None:
        model = network()
        with world.entered(transport):
            optimizer = distributed(model.parameters())
            loss(model, transport.rank, 0).backward()
            with pytest.raises(AssertionError, match="increase backward_passes_per_step"):
                loss(model, transport.rank, 0).backward()
            optimizer.set_backward_passes_per_step(2)
            assert optimizer.backward_passes_per_step == 2
            optimizer.zero_grad()
            for _ in range(2):
                loss(model, transport.rank, 0).backward()
            optimizer.step()

    threads(2, program)


def test_parameter_without_local_gradient_takes_the_other_ranks_change(threads):
    def program(transport: LocalTransport) -> list[float]:
        parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
        with world.entered(transport):
            optimizer = distributed([parameter])
            if transport.rank == 1:
                parameter.grad = torch.tensor([-1.0, -2.0], dtype=torch.float64)
            optimizer.step()
        return parameter.tolist()

    assert threads(3, program) == [[1.0, 2.0]] * 3


def test_sparse_gradients_of_all_ranks_are_applied(threads):
    def program(transport: LocalTransport) -> torch.Tensor:
        embedding = torch.nn.Embedding(4, 2, sparse=True)
        with torch.no_grad():
            embedding.weight.zero_()
        with world.entered(transport):
            optimizer = distributed(embedding.parameters())
            embedding(torch.tensor([transport.rank, transport.rank])).sum().backward()
            optimizer.step()
        return embedding.weight.detach()

    for weight in threads(3, program):
        assert weight.tolist() == [[-2.0, -2.0]] * 3 + [[0.0, 0.0]]


def test_nonfinite_gradient_skips_the_step_on_every_rank(threads, caplog):
    def program(transport: LocalTransport) -> Any:
        model = network()
        with world.entered(transport):
            optimizer = DistributedOptimizer(OPTIMIZERS["adam"](model.parameters()), op=Adasum)
            loss(model, transport.rank, 0).backward()
            if transport.rank == 1:
                model[0].bias.grad[3] = float("inf")
            optimizer.step()
            assert optimizer.last_step.skipped
            assert optimizer.skipped_steps == 1
            assert not optimizer.state  # of Adam: it has not seen the gradient
            assert torch.equal(weights(model), weights(network()))
            optimizer.zero_grad()
            loss(model, transport.rank, 0).backward()
            optimizer.step()
            assert not optimizer.last_step.skipped
        return weights(model)

    replicas = threads(3, program)
    assert all(torch.equal(replica, replicas[0]) for replica in replicas)
    assert not torch.equal(replicas[0], weights(network()))
    assert "the gradient is not finite on ranks [1]" in caplog.text


def test_nonfinite_combined_step_changes_no_parameter_on_any_rank(threads, caplog):
    def program(transport: LocalTransport) -> list[float]:
        parameter = torch.nn.Parameter(torch.ones(3))
        with world.entered(transport):
            optimizer = distributed([parameter])
            optimizer.param_groups[0]["lr"] = 1e30 if transport.rank == 0 else 1.0
            parameter.grad = torch.full_like(parameter, 1e20)
            optimizer.step()
            assert optimizer.skipped_steps == 1
        return parameter.tolist()

    assert threads(2, program) == [[1.0] * 3] * 2
    assert "the combined change of the parameters is not finite" in caplog.text


@pytest.mark.parametrize("synchronize_first", [False, True])
def test_steps_skipped_beyond_max_skipped_steps_raise_on_every_rank(threads, synchronize_first):
    def program(transport: LocalTransport) -> tuple[int, str]:
        parameter = torch.nn.Parameter(torch.zeros(2))
        with world.entered(transport):
            optimizer = distributed([parameter], max_skipped_steps=2)

            def step(slope: float) -> None:
                parameter.grad = torch.full((2,), slope if transport.rank == 1 else 1.0)
                if synchronize_first:
                    optimizer.synchronize()
                optimizer.step()

            for slope in (math.nan, math.nan, 1.0, math.inf, math.nan):
                step(slope)
            with pytest.raises(FloatingPointError) as error:
                step(math.nan)
        assert parameter.tolist() == [-1.0, -1.0]
        return optimizer.skipped_steps, str(error.value)

    ended = threads(2, program)
    assert [skipped for skipped, _ in ended] == [5, 5]
    for rank, (_, message) in enumerate(ended):
        assert message == (
            f"rank {rank}: 3 steps in a row were skipped at step 5, the last because the gradient "
            "is not finite on ranks [1]; max_skipped_steps=2 allows no more"
        )


def test_skipped_step_counts_once_after_repeated_synchronize(threads):
    """A GradScaler leaves out the step after the first; the model clears its gradients."""

    def program(transport: LocalTransport) -> int:
        parameter = torch.nn.Parameter(torch.zeros(2))
        with world.entered(transport):
            optimizer = distributed([parameter])
            for steps in (0, 1):
                parameter.grad = None
                (parameter * math.nan).sum().backward()
                for _ in range(3):
                    optimizer.synchronize()
                for _ in range(steps):
                    optimizer.step()
            return optimizer.skipped_steps

    assert threads(2, program) == [2, 2]


def test_unequal_max_skipped_steps_raise_on_every_rank(threads):
    def program(transport: LocalTransport) -> None:
        parameter = torch.nn.Parameter(torch.zeros(2))
        with world.entered(transport):
            optimizer = distributed([parameter], max_skipped_steps=5 * transport.rank)
            parameter.grad = torch.ones(2)
            with pytest.raises(HorovodInternalError, match="max_skipped_steps=5"):
                optimizer.step()

    threads(2, program)


def test_grad_scaler_after_synchronize_skips_the_step_on_every_rank(threads):
    def program(transport: LocalTransport) -> list[list[float]]:
        parameter = torch.nn.Parameter(torch.zeros(2))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        history = []
        with world.entered(transport):
            optimizer = distributed([parameter])
            for step in range(2):
                optimizer.zero_grad()
                slope = float("inf") if (step, transport.rank) == (0, 1) else -1.0
                scaler.scale((slope * parameter).sum()).backward()
                optimizer.synchronize()
                scaler.step(optimizer)
                scaler.update()
                history.append(parameter.tolist())
        return history

    assert threads(2, program) == [[[0.0, 0.0], [1.0, 1.0]]] * 2


def test_gradients_clipped_after_synchronize_bound_the_step(threads):
    def program(transport: LocalTransport) -> list[float]:
        parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        with world.entered(transport):
            optimizer = distributed([parameter])
            (-8.0 * parameter).sum().backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_value_([parameter], 2.0)
            optimizer.step()
        return parameter.tolist()

    assert threads(2, program) == [[2.0]] * 2


def test_skip_synchronize_raises(threads):
    def program(transport: LocalTransport) -> None:
        with world.entered(transport):
            optimizer = distributed([torch.nn.Parameter(torch.zeros(2))])
            with (
                pytest.raises(AssertionError, match="does not apply to op=Adasum"),
                optimizer.skip_synchronize(),
            ):
                pass

    threads(2, program)


def test_step_with_closure_returns_the_local_loss(threads):
    def program(transport: LocalTransport) -> float:
        model = network()
        with world.entered(transport):
            optimizer = distributed(model.parameters())

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                value = loss(model, transport.rank, 0)
                value.backward()
                return value

            value = optimizer.step(closure).item()
        assert not torch.equal(weights(model), weights(network()))
        return value

    for rank, value in enumerate(threads(2, program)):
        assert value == loss(network(), rank, 0).item()


def test_wrapped_optimizer_keeps_its_type_state_and_scheduler(threads):
    def program(transport: LocalTransport) -> None:
        model = network()
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)
        with world.entered(transport):
            optimizer = DistributedOptimizer(inner, model.named_parameters(), op=Adasum)
            assert isinstance(optimizer, torch.optim.SGD)
            assert optimizer.op == Adasum
            loss(model, transport.rank, 0).backward()
            optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
            scheduler.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
        assert optimizer.state

    threads(2, program)


def test_unequal_compression_raises_on_every_rank(threads):
    def program(transport: LocalTransport) -> None:
        parameter = torch.nn.Parameter(torch.zeros(2))
        compression = [Compression.none, Compression.fp16][transport.rank]
        with world.entered(transport):
            optimizer = distributed([parameter], compression=compression)
            parameter.grad = torch.ones_like(parameter)
            with pytest.raises(HorovodInternalError, match="FP16Compressor"):
                optimizer.step()

    threads(2, program)


@pytest.mark.parametrize(
    ("make", "options", "kind", "message"),
    [
        (torch.optim.SGD, {"compression": Compression.gtopk(0.1)}, TypeError, "dense vectors"),
        (torch.optim.SGD, {"compression": None}, TypeError, "got None"),
        (torch.optim.SGD, {"backward_passes_per_step": 0}, ValueError, "at least 1, got 0"),
        (torch.optim.SGD, {"gradient_predivide_factor": 2.0}, ValueError, "op=Average only"),
        (torch.optim.SGD, {"global_clip_norm": 2.0}, ValueError, "global_clip_norm is not for"),
        (torch.optim.SGD, {"check_every": 5}, ValueError, "check_every is not for"),
        (torch.optim.SGD, {"on_divergence": "heal"}, ValueError, "on_divergence is not for"),
        (torch.optim.LBFGS, {}, ValueError, "LBFGS"),
        (lambda p: distributed(p), {}, ValueError, "distributed already"),
    ],
)
def test_unsupported_optimizer_or_option_raises_at_construction(
    threads, make, options, kind, message
):
    def program(transport: LocalTransport) -> None:
        with world.entered(transport), pytest.raises(kind, match=message):
            DistributedOptimizer(make(network().parameters()), op=Adasum, **options)

    threads(2, program)


@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        (torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64)), "complex"),
        (torch.nn.Parameter(torch.zeros(2), requires_grad=False), "requires a gradient"),
    ],
)
def test_complex_or_frozen_parameters_raise_at_construction(threads, parameter, message):
    def program(transport: LocalTransport) -> None:
        with world.entered(transport), pytest.raises(ValueError, match=message):
            distributed([parameter])

    threads(2, program)


@pytest.mark.parametrize("how", ["added", "unfrozen"])
def test_parameter_added_or_unfrozen_later_is_trained(threads, how):
    def program(transport: LocalTransport) -> list[float]:
        first, late = (torch.nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in "ab")
        late.requires_grad_(how == "added")
        with world.entered(transport):
            optimizer = distributed([first] + ([late] if how == "unfrozen" else []))
            first.sum().backward()
            optimizer.step()
            late.requires_grad_(True)
            if how == "added":
                optimizer.add_param_group({"params": [late]})
            for _ in range(2):
                optimizer.zero_grad()
                (-2.0 * late).sum().backward()
                optimizer.step()
        return [first.item(), late.item()]

    assert threads(3, program) == [[-1.0, 4.0]] * 3


def test_distributed_optimizer_cannot_be_copied():
    with world.entered(local_world(1)[0]), pytest.raises(TypeError, match="neither copied"):
        copy.deepcopy(distributed([torch.nn.Parameter(torch.zeros(2))]))


def test_compressor_that_returns_integers_raises_and_changes_nothing(threads):
    def program(transport: LocalTransport) -> None:
        parameter = torch.nn.Parameter(torch.zeros(2))
        with world.entered(transport):
            optimizer = distributed([parameter], compression=IntegerCompressor)
            parameter.grad = torch.ones_like(parameter)
            with pytest.raises(ValueError, match=r"IntegerCompressor returns torch\.int32"):
                optimizer.step()
        assert parameter.tolist() == [0.0, 0.0]

    threads(2, program)


def test_last_step_reports_sent_bytes_and_times(threads):
    length = 4096

    def program(transport: LocalTransport) -> Any:
        parameter = torch.nn.Parameter(torch.zeros(length))
        with world.entered(transport):
            optimizer = distributed([parameter])
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        return optimizer.last_step

    for report in threads(2, program):
        assert (report.algorithm, report.updated, report.skipped) == ("adasum", length, False)
        # Half of the vector is sent and half is returned; the rest is for agreement.
        assert 4 * length < report.sent_bytes < 4 * length + 2000
        assert report.compute_seconds > 0 < report.communicate_seconds


def test_digits_train_at_the_learning_rate_of_one_rank(threads):
    data = load("digits")
    inputs, labels = data.train.tensors

    def program(transport: LocalTransport) -> float:
        generator = torch.Generator().manual_seed(1)
        model = mlp(data.features, 32, data.classes)
        for parameter in model.parameters():
            parameter.data.normal_(std=0.15, generator=generator)
        with world.entered(transport):
            optimizer = DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), op=Adasum
            )
            for step in range(60):
                batch = np.random.default_rng([step, transport.rank]).choice(len(inputs), 32)
                optimizer.zero_grad()
                F.cross_entropy(model(inputs[batch]), labels[batch]).backward()
                optimizer.step()
        with torch.no_grad():
            x, y = data.test.tensors
            return (model(x).argmax(1) == y).double().mean().item()

    accuracies = threads(3, program)
    assert len(set(accuracies)) == 1
    assert accuracies[0] > 0.85


def test_loading_a_state_with_residuals_warns_that_they_are_lost(threads, caplog):
    def program(transport):
        with world.entered(transport):
            parameter = torch.nn.Parameter(torch.zeros(30))
            sparse = DistributedOptimizer(
                torch.optim.SGD([parameter], lr=1.0), compression=Compression.gtopk(0.1)
            )
            adasum = DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), op=Adasum)
            adasum.load_state_dict(sparse.state_dict())
            assert "lost" not in caplog.text
            transport.barrier()
            parameter.grad = torch.arange(30.0)
            sparse.step()
            state = sparse.state_dict()
            ((part,),) = (held.values() for held in state["gtopk"]["held"].values())
            assert float(part["residual"].norm()) > 1
            norms.add(f"(their norm: {float(part['residual'].norm()):.3g})")
            adasum.load_state_dict(state)

    norms: set[str] = set()
    with caplog.at_level(logging.WARNING, "gtopk"):
        threads(2, program)
    messages = sorted(record.getMessage() for record in caplog.records)
    lost = [text for text in messages if "are lost" in text]
    assert [text[:7] for text in lost] == ["rank 0:", "rank 1:"]
    (norm,) = norms  # both ranks had the same gradient
    assert all(norm in text for text in lost)


def test_optimizer_continues_in_the_next_world():
    """As after elastic's recovery, here with fewer ranks."""
    models = [network() for _ in range(3)]
    optimizers: list[Any] = [None] * 3

    def train(transport: LocalTransport) -> None:
        rank = transport.rank
        with world.entered(transport):
            optimizers[rank] = optimizers[rank] or DistributedOptimizer(
                torch.optim.SGD(models[rank].parameters(), lr=0.1), op=Adasum
            )
            for step in range(2):
                optimizers[rank].zero_grad()
                loss(models[rank], rank, step).backward()
                optimizers[rank].step()

    run_ranks(local_world(3, 30), train)
    run_ranks(local_world(2, 30), train)
    one, other, left = ([*model.parameters()] for model in models)
    assert all(map(torch.equal, one, other))
    assert not any(map(torch.equal, one, left))


def test_host_waits_for_a_gpu_once_for_all_gradients_and_once_for_all_changes(
    threads, monkeypatch
) -> None:
    monkeypatch.setattr(buckets, "_on_gpu", lambda device: True)
    read, own = [], torch.Tensor.__bool__
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda each: (read.append(1), own(each))[1])
    threads(2, lambda transport: train(transport, OPTIMIZERS["sgd"]))
    assert len(read) == 2 * 2 * 8  # of two ranks, in eight steps

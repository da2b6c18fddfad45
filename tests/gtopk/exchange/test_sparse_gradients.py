"""Row-sparse gradients are reduced as rows, with the same sum as dense ones."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import gtopk.torch as hvd
from collectives.transports import LocalTransport, local_world
from gtopk.compression import Compression
from gtopk.errors import HorovodInternalError
from gtopk.exchange import sparse_gradients
from gtopk.optim.distributed import DistributedOptimizer
from gtopk.reduce_ops import Average, Sum
from gtopk.runtime.world import world
from tests.gtopk.four_layers import distribute, flat

ROWS, WIDTH, STEPS = 50, 3, 3


def tables() -> torch.nn.ParameterDict:
    generator = torch.Generator().manual_seed(7)
    return torch.nn.ParameterDict(
        {
            "embedding": torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator),
            "output": torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator),
            "bias": torch.zeros(WIDTH, dtype=torch.float64),
        }
    )


def drawn(rank: int, step: int) -> torch.Tensor:
    """Return rows of the table, some repeated; none in rank 2's first step."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    count = 0 if (rank, step) == (2, 0) else 20
    return torch.randint(10, (count,), generator=generator) * (rank + 1)


def loss(model: torch.nn.ParameterDict, rows: torch.Tensor, *, sparse: bool) -> torch.Tensor:
    hidden = torch.tanh(F.embedding(rows, model["embedding"], sparse=sparse) + model["bias"])
    scores = hidden @ F.embedding(rows.unique(), model["output"], sparse=sparse).T
    return scores.square().sum()


def train_as_one_process(size: int) -> torch.Tensor:
    model = tables()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        mean = sum(loss(model, drawn(rank, step), sparse=False) for rank in range(size)) / size
        mean.backward()
        optimizer.step()
    return flat(model)


def test_sparse_rows_train_as_one_process_and_are_sent_once(threads) -> None:
    def program(transport: LocalTransport) -> tuple[torch.Tensor, list[bool], list[int]]:
        model = tables()
        with world.entered(transport):
            optimizer = DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.01),
                named_parameters=model.named_parameters(),
                compression=Compression.gtopk(1.0),
            )
            sparse, sent = [], []
            for step in range(STEPS):
                optimizer.zero_grad()
                rows = drawn(transport.rank, step)
                loss(model, rows, sparse=True).backward()
                optimizer.step()
                sparse += [model[name].grad.is_sparse for name in ("embedding", "output")]
                sent.append(optimizer.last_step.selected - 2 * len(rows.unique()))
        return flat(model), sparse, sent

    for size in (1, 2, 3):
        ends = threads(size, program)
        for end, sparse, sent in ends:
            assert torch.equal(end, ends[0][0])
            torch.testing.assert_close(end, train_as_one_process(size), rtol=1e-12, atol=1e-12)
            assert all(sparse)
            assert all(dense in (0, WIDTH) for dense in sent)  # only the bias is dense


class EmbeddingModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.nn.Embedding(9, 3, sparse=True).double()
        self.after = torch.nn.Linear(3, 2).double()
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data.normal_(generator=generator)

    def forward(self, at: torch.Tensor) -> torch.Tensor:
        return self.after(self.rows(at)).square().sum()


@pytest.mark.parametrize("op", [Average, Sum])
@pytest.mark.parametrize("as_dense", [False, True])
@pytest.mark.parametrize("absent", [False, True])
def test_sparse_gradients_train_as_one_process(threads, op, as_dense, absent):
    """Also if a rank looks up nothing."""
    size = 3

    def indices(rank: int, step: int) -> torch.Tensor:
        return torch.tensor([rank, (rank + step) % 9, rank]) if rank or not absent else None

    def value(model: EmbeddingModel, rank: int, step: int) -> torch.Tensor:
        at = indices(rank, step)
        return model(at) if at is not None else model.after(torch.ones(1, 3).double()).sum()

    def program(transport: LocalTransport) -> torch.Tensor:
        model = EmbeddingModel()
        with world.entered(transport):
            optimizer = DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.01),
                model.named_parameters(),
                op=op,
                sparse_as_dense=as_dense,
            )
            for step in range(3):
                optimizer.zero_grad()
                value(model, transport.rank, step).backward()
                optimizer.synchronize()
                assert model.rows.weight.grad.is_sparse
                assert model.rows.weight.grad.sparse_dim() == 1
                with optimizer.skip_synchronize():
                    optimizer.step()
        return flat(model)

    alone = EmbeddingModel()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        total = sum(value(alone, rank, step) for rank in range(size))
        (total / size if op == Average else total).backward()
        optimizer.step()
    replicas = threads(size, program)
    torch.testing.assert_close(replicas[0], flat(alone), rtol=1e-12, atol=1e-12)
    assert all(torch.equal(replica, replicas[0]) for replica in replicas)


@pytest.mark.parametrize("compression", [Compression.none, Compression.fp16, Compression.topk(1.0)])
@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_adam_gets_sparse_gradients_on_every_rank(threads, compression, as_dense):
    """Also on a rank without a gradient, in its first step or later."""
    drawn = {0: [None, [0, 3], [3, 3, 5], None], 1: [[0, 1], None, [8], None]}

    def program(transport: LocalTransport) -> torch.Tensor:
        table = EmbeddingModel().rows
        with world.entered(transport):
            optimizer = DistributedOptimizer(
                torch.optim.SparseAdam(table.parameters(), lr=0.1),
                compression=compression,
                sparse_as_dense=as_dense,
            )
            for rows in drawn[transport.rank]:
                optimizer.zero_grad()
                if rows is not None:
                    (table(torch.tensor(rows)) / 2).square().sum().backward()
                optimizer.step()
        return table.weight.detach()

    alone = EmbeddingModel().rows
    optimizer = torch.optim.SparseAdam(alone.parameters(), lr=0.1)
    for ranks in zip(*drawn.values(), strict=True):
        rows = [torch.tensor(of_rank) for of_rank in ranks if of_rank is not None]
        if rows:
            optimizer.zero_grad()
            (sum((alone(each) / 2).square().sum() for each in rows) / 2).backward()
            optimizer.step()
    tolerance = 1e-3 if compression is Compression.fp16 else 1e-12
    first, second = threads(2, program)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, alone.weight.detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("as_dense", [False, True])
def test_gradient_that_becomes_sparse_gets_a_new_bucket(threads, as_dense):
    def program(transport: LocalTransport) -> torch.Tensor:
        model = EmbeddingModel()
        model.rows.sparse = False
        with world.entered(transport):
            optimizer = distribute(model, Compression.gtopk(0.2), sparse_as_dense=as_dense)
            for step in range(4):
                model.rows.sparse = step >= 2 and (step > 2 or transport.rank == 1)
                optimizer.zero_grad()
                model(torch.tensor([transport.rank, step])).backward()
                optimizer.step()
                assert model.rows.weight.grad.is_sparse == (step >= 2)
        return flat(model)

    replicas = threads(2, program)
    assert torch.equal(*replicas)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_gradient_without_momentum_is_warned_of_once(threads, caplog, momentum, as_dense):
    def program(transport: LocalTransport) -> None:
        model = EmbeddingModel()
        with world.entered(transport):
            optimizer = distribute(
                model,
                Compression.gtopk(0.5, momentum_correction=momentum),
                sparse_as_dense=as_dense,
            )
            for _ in range(3):
                optimizer.load_state_dict(optimizer.state_dict())  # plans buckets again
                optimizer.zero_grad()
                model(torch.tensor([1])).backward()
                optimizer.step()

    with caplog.at_level(logging.WARNING, "gtopk"):
        threads(2, program)
    warnings = [text for text in caplog.messages if "momentum" in text]
    if as_dense or not momentum:
        assert warnings == []
        return
    (text,) = warnings
    assert "'rows.weight' are trained without" in text
    assert "sparse_as_dense=True" in text


@pytest.mark.parametrize("sparse_value", [float("nan"), float("inf")])
def test_nonfinite_sparse_gradient_skips_the_step(threads, sparse_value):
    def program(transport: LocalTransport) -> torch.Tensor:
        model = EmbeddingModel()
        with world.entered(transport):
            optimizer = distribute(model)
            before = flat(model)
            model(torch.tensor([transport.rank, 3])).backward()
            if transport.rank:
                model.rows.weight.grad._values()[0, 0] = sparse_value
            optimizer.step()
            assert optimizer.last_step.skipped
            assert torch.equal(before, flat(model))

    threads(2, program)


def give_sparse_gradient(parameter: torch.Tensor) -> None:
    """Give a parameter a gradient that is sparse in all dimensions."""
    indices = torch.zeros(1, WIDTH, dtype=torch.int64)
    torch.gather(parameter, 0, indices, sparse_grad=True).sum().backward()


def test_rank_without_gradient_takes_fully_sparse_gradients(threads):
    def program(transport: LocalTransport) -> torch.Tensor:
        parameter = torch.nn.Parameter(torch.zeros(4, WIDTH))
        with world.entered(transport):
            optimizer = DistributedOptimizer(
                torch.optim.SGD([parameter], lr=1.0), missing_gradients="zeros"
            )
            if transport.rank:
                give_sparse_gradient(parameter)
            optimizer.step()
        return parameter.detach()

    expected = torch.zeros(4, WIDTH)
    expected[0] = -0.5
    assert all(torch.equal(weight, expected) for weight in threads(2, program))


@pytest.mark.parametrize("missing", [True, False])
def test_step_without_sparse_entries_on_any_rank_changes_nothing(threads, missing):
    def program(transport: LocalTransport) -> None:
        model = tables()
        with world.entered(transport):
            optimizer = distribute(model, Compression.none)
            loss(model, drawn(transport.rank, 1), sparse=True).backward()
            optimizer.step()
            before = flat(model)
            optimizer.zero_grad()
            if not missing:
                F.embedding(drawn(2, 0), model["embedding"], sparse=True).sum().backward()
            optimizer.step()
            assert torch.equal(flat(model), before)
            assert (model["embedding"].grad is None) == missing

    threads(2, program)


def test_unequal_sparse_dimensions_raise_and_name_the_ranks(threads, monkeypatch):
    monkeypatch.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", "1")

    def program(transport: LocalTransport) -> None:
        parameter = torch.nn.Parameter(torch.zeros(4, WIDTH))
        with world.entered(transport):
            pair = hvd.add_process_set([1, 2])
            if transport.rank == 0:
                return
            optimizer = DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), process_set=pair)
            if transport.rank == 2:
                give_sparse_gradient(parameter)
            else:
                F.embedding(torch.tensor([1]), parameter, sparse=True).sum().backward()
            with pytest.raises(
                HorovodInternalError,
                match="1 sparse dimensions on rank 1, 2 sparse dimensions on rank 2; use the same ",
            ):
                optimizer.step()

    threads(3, program)


@pytest.mark.parametrize("option", ["local_clip_norm", "global_clip_norm"])
def test_sparse_gradients_are_clipped_with_the_dense_ones(threads, option):
    def program(transport: LocalTransport) -> torch.Tensor:
        model = tables()
        before = flat(model)
        with world.entered(transport):
            optimizer = distribute(model, Compression.none, **{option: 0.01})
            loss(model, drawn(0, 1), sparse=True).backward()
            optimizer.step()
        return (flat(model) - before).norm()

    # 0.1 is the learning rate; two ranks' equal gradients, each of its share, are not independent.
    shares = {"local_clip_norm": 0.01 * 2**0.5, "global_clip_norm": 0.01}
    for moved in threads(2, program):
        assert float(moved) == pytest.approx(0.1 * shares[option])


def test_embedding_that_becomes_sparse_in_an_early_bucket_is_replanned(threads):
    def program(transport: LocalTransport) -> torch.Tensor:
        model = tables()
        with world.entered(transport):
            optimizer = DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.01),
                model.items(),
                Compression.gtopk(0.5),
                bucket_bytes=8,
            )
            for step in range(5):
                optimizer.zero_grad()
                loss(model, drawn(transport.rank, step), sparse=step > 2).backward()
                optimizer.step()
        return flat(model)

    one, other = threads(2, program)
    assert torch.equal(one, other)


def test_entries_are_read_on_the_stream_of_the_captured_gradient(monkeypatch) -> None:
    """The engine's thread, which reads them, has another current stream of the GPU."""
    now, active = ["of backward"], []

    def streams(gpus: list[torch.device]) -> Any:
        return partial(entered, now[0])

    @contextmanager
    def entered(stream: str) -> Iterator[None]:
        active.append(stream)
        yield
        active.pop()

    monkeypatch.setattr(sparse_gradients, "current_streams", streams)
    parameter = torch.nn.Parameter(torch.zeros(4, WIDTH))
    exchange = sparse_gradients.SparseGradientExchange("embedding", parameter, "embedding")
    F.embedding(torch.tensor([1]), parameter, sparse=True).sum().backward()
    now[0] = "of the step"
    exchange.capture_gradients(1.0, 1.0)
    now[0] = "of the engine"
    (transport,) = local_world(1)
    gather = transport.allgather
    read = []
    monkeypatch.setattr(transport, "allgather", lambda m: (read.extend(active), gather(m))[1])
    exchange.reduce(transport)
    assert read == ["of the step"] * 2

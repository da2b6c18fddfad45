"""A script's default device, such as a GPU, does not affect messages, counts or random draws.

"meta" replaces the GPU: tensors created there have no content.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import gtopk.torch as hvd
from gtopk import load_latest, save_checkpoint
from gtopk.adaptive.current_batch import Memory
from gtopk.adaptive.noise_scale import GradientCopy
from gtopk.adaptive.partitioning.cuts import shuffled

Device = Callable[[], AbstractContextManager[Any]]
sparse = partial(torch.sparse_coo_tensor, check_invariants=True)


def sums_and_rows(rank: int, device: Device, folder: Path) -> Any:
    rows = torch.ones(4) * (1 + rank)
    two = sparse([[rank, 2]], [1.0, 2.0], (3,))
    with device():
        exchanged = hvd.alltoall(rows, splits=[1, 3])
        gathered = hvd.sparse_allreduce_async(two, name="sparse", op=hvd.Sum)()
        return hvd.allreduce(rows), exchanged, gathered.to_dense()


def steps_with_sparse_gradients(rank: int, device: Device, folder: Path) -> Any:
    table = torch.nn.Parameter(torch.zeros(3, 2))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([table], lr=1.0), missing_gradients="zeros"
    )
    for step in range(3):
        gradient = sparse([[step]], torch.ones(1, 2), (3, 2))
        table.grad = None if step == rank + 1 else gradient
        with device():
            optimizer.step()
    return table


def sparse_gradients_after_dense_ones(rank: int, device: Device, folder: Path) -> Any:
    """gTop-k's residual is sent together with the sparse ones."""
    table = torch.nn.Parameter(torch.zeros(8, 2))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([table], lr=1.0), compression=hvd.Compression.gtopk(0.1)
    )
    for gradient in (torch.ones(8, 2), sparse([[3]], torch.ones(1, 2), (8, 2))):
        table.grad = gradient
        with device():
            optimizer.step()
    assert table.detach().eq(-1).sum() >= 14  # all rows but row 3, which was stepped twice
    return table


def batch_norm(rank: int, device: Device, folder: Path) -> Any:
    norm, rows = hvd.SyncBatchNorm(2), torch.arange(12.0).reshape(6, 2)
    with device():
        return norm(rows[: 6 * rank]), norm.running_mean  # rank 0 has no rows


def checkpoint_round_trip(rank: int, device: Device, folder: Path) -> Any:
    model = torch.nn.Linear(2, 2)
    torch.nn.init.ones_(model.weight)
    torch.nn.init.ones_(model.bias)
    resumed = torch.nn.Linear(2, 2)
    with device():
        save_checkpoint(folder, model, None)
        load_latest(folder, resumed, generators=False)
    return resumed.state_dict()


def elastic_state(rank: int, device: Device, folder: Path) -> Any:
    with device():
        state = hvd.elastic.ObjectState(epoch=1)
        state.commit()
        return state.epoch, list(hvd.elastic.ElasticSampler(range(9)))


def adapted_batches(rank: int, device: Device, folder: Path) -> Any:
    used, unused = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    rows = torch.arange(6.0).reshape(3, 2)
    with device():
        copy = GradientCopy([used, unused])
        copy.arm([])
        (rows[0] * used).sum().backward()
        memory = Memory(rank)
        loss = memory.backward(lambda part: (part * used).sum(), rows, 3, summed=True)
        return loss, copy.disarm(), shuffled(9, seed=1, epoch=2)


@pytest.mark.parametrize(
    "work",
    [
        sums_and_rows,
        steps_with_sparse_gradients,
        sparse_gradients_after_dense_ones,
        batch_norm,
        checkpoint_round_trip,
        elastic_state,
        adapted_batches,
    ],
)
def test_default_device_changes_no_result(
    ranks: Callable[..., list[Any]], tmp_path: Path, work: Callable[..., Any]
) -> None:
    def result_text(rank: int, name: str, device: Device) -> str:
        return str(work(rank, device, tmp_path / name))

    plain = ranks(2, lambda rank: result_text(rank, "plain", nullcontext))
    assert (
        ranks(2, lambda rank: result_text(rank, "elsewhere", lambda: torch.device("meta"))) == plain
    )

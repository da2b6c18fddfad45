"""Nodes merge their models while they train, and lose no update applied during a merge."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

import gtopk.torch as hvd
from collectives import PeerError
from gtopk.adaptive.hogbatch.node import NodeMerges
from gtopk.runtime.world.membership import World
from tests.gtopk.adaptive.hogbatch_workers import adapted, flat, train
from tests.gtopk.adaptive.modelled_ranks import network, on_ranks

NODES = [[0], [1]]  # one worker each, so that changes in a worker's step are its own


class Followed:
    """The updates that a node's worker applies, by the merge that includes them.

    applied:       one per merge; the last has the updates in no merge yet.
    beside_merges: steps taken during a merge.
    """

    def __init__(self, loader: Any, model: torch.nn.Module) -> None:
        self.applied = [torch.zeros_like(flat(model))]
        self.beside_merges = 0
        merging, writer = loader._node.merging, loader._writer
        merge, update = merging._merge, writer.update

        def follow_merge(is_last: bool) -> None:
            merge(is_last)
            self.applied.append(torch.zeros_like(self.applied[0]))

        def follow_update(apply: Callable[[], None]) -> None:
            before = flat(model).clone()
            update(apply)
            self.applied[-1] += flat(model) - before
            self.beside_merges += merging._pending is not None

        merging._merge, writer.update = follow_merge, follow_update


def trained(here: World, compression: Any) -> tuple[Followed, torch.Tensor]:
    loader, model, optimizer = adapted(nodes=NODES, compression=compression, merge_every=60)
    followed = Followed(loader, model)
    for _ in range(3):
        train(loader, model, optimizer)
    loader.drain()
    return followed, flat(model)


def test_merge_adds_mean_of_updates_applied_by_nodes() -> None:
    """The next merge includes updates that were applied during this one."""
    nodes, models = zip(*on_ranks(2, lambda here: trained(here, hvd.Compression.none)), strict=True)
    expected = flat(network())
    for merge in range(12):
        for node in nodes:
            expected = expected + node.applied[merge] / len(nodes)
    assert any(node.beside_merges for node in nodes)
    for node, model in zip(nodes, models, strict=True):
        assert len(node.applied) == 12 + 1
        assert not node.applied[12].any()
        torch.testing.assert_close(model, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("number", [0, 3])
def test_failed_merge_raises_on_all_workers(number: int) -> None:
    """Regression: the other workers waited for the live leader until their timeouts."""
    over = threading.Barrier(4)

    def program(here: World) -> str:
        loader, model, optimizer = adapted(nodes=[[0, 1], [2, 3]], merge_every=60)
        merging, exchange = loader._node.merging, []

        def fails(*arguments: Any) -> Any:
            exchange.append(arguments)
            if len(exchange) == number + 1:
                raise RuntimeError("no way through")
            return reduced(*arguments)

        if here.rank in (0, 2):
            reduced = merging._replica.exchange
            merging._replica.exchange = fails
        with pytest.raises((PeerError, hvd.HorovodInternalError, RuntimeError)) as raised:
            train(loader, model, optimizer)
        over.wait()
        return str(raised.value)

    for error in on_ranks(4, program):
        assert "no way through" in error


@pytest.mark.parametrize("density", [0.05, 0.2, 1.0])
def test_drain_merges_all_updates_that_topk_withheld(density: float) -> None:
    compression = hvd.Compression.gtopk(density=density)
    results = on_ranks(2, lambda here: trained(here, compression))
    expected = flat(network()) + sum(sum(node.applied) / 2 for node, _ in results)
    assert any(node.beside_merges for node, _ in results)
    for _, model in results:
        torch.testing.assert_close(model, expected, rtol=1e-11, atol=1e-13)


def test_leader_that_merges_and_leaves_is_not_reported_missing() -> None:
    head = np.zeros(1, np.dtype([("merged", np.int64)]))

    def end(place: int) -> bool:
        head["merged"][0] = 5  # while this worker checks
        return False

    merging = object.__new__(NodeMerges)
    merging._node = SimpleNamespace(
        table=SimpleNamespace(head=head),
        memory=SimpleNamespace(is_present=end),
        ranks=[0, 1],
        ledger=SimpleNamespace(round=5, is_healthy=True, require_healthy=lambda: None),
    )
    merging._world = SimpleNamespace(rank=1, transport=SimpleNamespace(timeout_seconds=10.0))
    merging._await_leader()


@pytest.mark.parametrize("kinds", [("fast", "fast"), ("slow", "fast")])
def test_model_loaded_after_adapt_is_trained(kinds: Any) -> None:
    def program(here: World) -> tuple[bool, bool]:
        loader, model, _ = adapted(device_class=kinds[hvd.rank()])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(7.0)
        hvd.barrier()
        batches = iter(loader)
        next(batches)
        begins_there = bool((flat(model) == 7.0).all())
        batches.close()
        hvd.barrier()
        loader.drain()
        return begins_there, bool((flat(model) == 7.0).all())

    assert on_ranks(2, program) == [(True, True)] * 2


@pytest.mark.parametrize("is_finite", [False, True])
def test_skipped_merge_keeps_updates_of_each_node(is_finite: bool, caplog: Any) -> None:
    model, center = torch.full((4,), 3.0), torch.ones(4)
    merging = object.__new__(NodeMerges)
    merging._snapshot, merging._before = [model.clone()], [model.clone()]
    merging._tensors, merging._is_last, merging.merges = [model], False, 0
    merging._pending = merging._steps = MagicMock()
    merging._node = SimpleNamespace(table=MagicMock())
    merging._world = SimpleNamespace(rank=2)
    update = [torch.ones(4)] if is_finite else None
    merging._wait = lambda pending: (0.5, update, 0)  # type: ignore[method-assign]

    def merge(update: Any, weight: float) -> None:
        merging._snapshot[0].copy_(center if update is None else center + update[0])

    merging._replica = SimpleNamespace(merge=merge, reduction=None)
    merging._finish_merge()
    assert model.tolist() == [2.0 if is_finite else 3.0] * 4
    assert ("a merge of the nodes' models was skipped" in caplog.text) != is_finite

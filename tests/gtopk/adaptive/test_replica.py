"""Merges of replicas: the invariants of normalized and elastic merging, dense and compressed."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch

import gtopk.torch as hvd
from collectives.transports import LocalTransport, local_world, run_ranks
from gtopk.adaptive.replica import Replica

SHAPES = [(7, 5), (5,), (3, 2, 2)]
COMPRESSIONS = [
    hvd.Compression.none,
    hvd.Compression.gtopk(density=0.2),
    hvd.Compression.gtopk(density=0.1, growth=1.0),
    hvd.Compression.topk(density=0.1),
]


def flat(tensors: Any) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


class World:
    """Replicas of one model that train separately, and merge on threads."""

    def __init__(self, ranks: int, compression: Any, momentum: float = 0.0) -> None:
        start = torch.Generator().manual_seed(0)
        values = [torch.randn(shape, generator=start, dtype=torch.float64) for shape in SHAPES]
        self.replicas = [
            Replica([torch.nn.Parameter(v.clone()) for v in values], compression, momentum)
            for _ in range(ranks)
        ]
        self._noise = torch.Generator().manual_seed(1)

    @torch.no_grad()
    def train(self) -> None:
        for replica in self.replicas:
            for parameter in replica.parameters:
                parameter += torch.randn(
                    parameter.shape, generator=self._noise, dtype=torch.float64
                )

    def merge(self, weights: list[float], how: str = "merge") -> list[bool]:
        finite = [replica.prepare() for replica in self.replicas]

        def exchange(transport: LocalTransport) -> Any:
            with np.errstate(over="ignore", invalid="ignore"):  # as in the engine
                return self.replicas[transport.rank].exchange(transport, weights[transport.rank])

        updates = run_ranks(local_world(len(self.replicas)), exchange)
        for replica, update, weight in zip(self.replicas, updates, weights, strict=True):
            getattr(replica, how)(update, weight)
        centers = [flat(replica.center) for replica in self.replicas]
        assert all(torch.equal(center, centers[0]) for center in centers)
        return finite

    def offsets(self) -> list[torch.Tensor]:
        return [flat(replica.offsets()) for replica in self.replicas]

    @property
    def center(self) -> torch.Tensor:
        return flat(self.replicas[0].center)


def weights_of(ranks: int, turn: int) -> list[float]:
    counts = [1 + (rank + turn) % 3 for rank in range(ranks)]
    return [count / sum(counts) for count in counts]


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=repr)
def test_center_and_weighted_offsets_are_conserved(compression: Any) -> None:
    for ranks in (1, 2, 3, 5):
        world = World(ranks, compression)
        for turn in range(4):  # weights change from merge to merge
            world.train()
            weights = weights_of(ranks, turn)
            pairs = list(zip(weights, world.offsets(), strict=True))
            before = world.center + sum(weight * offset for weight, offset in pairs)
            world.merge(weights)
            pairs = list(zip(weights, world.offsets(), strict=True))
            close(world.center + sum(weight * offset for weight, offset in pairs), before)


@pytest.mark.parametrize("keeps_all", [hvd.Compression.none, hvd.Compression.gtopk(density=1.0)])
def test_merge_of_all_entries_is_weighted_mean_of_replicas(keeps_all: Any) -> None:
    for ranks in (1, 3, 4):
        world = World(ranks, keeps_all)
        world.train()
        weights = weights_of(ranks, 0)
        models = [flat(replica.parameters) for replica in world.replicas]
        mean = sum(weight * model for weight, model in zip(weights, models, strict=True))
        world.merge(weights)
        close(world.center, mean)
        for replica in world.replicas:
            assert torch.equal(flat(replica.parameters), world.center)


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=repr)
def test_elastic_exchange_conserves_sum_of_center_and_replicas(compression: Any) -> None:
    for ranks in (1, 2, 3):
        world = World(ranks, compression)
        for _ in range(3):
            world.train()
            before = world.center + sum(flat(replica.parameters) for replica in world.replicas)
            offsets = world.offsets()
            world.merge([0.9 / ranks] * ranks, how="pull")
            after = world.center + sum(flat(replica.parameters) for replica in world.replicas)
            close(after, before)
            if compression is hvd.Compression.none:
                pulled = [offset * 0.9 / ranks for offset in offsets]
                for before_it, after_it, pull in zip(offsets, world.offsets(), pulled, strict=True):
                    close(after_it, before_it - pull - sum(pulled))


@pytest.mark.parametrize("how", ["merge", "pull"])
def test_momentum_moves_the_center(how: str) -> None:
    plain, moved = World(2, hvd.Compression.none), World(2, hvd.Compression.none, momentum=0.5)
    centers = [moved.center]
    for turn in range(3):
        for world in (plain, moved):
            for replica in world.replicas:
                with torch.no_grad():
                    torch._foreach_add_(replica.parameters, 1.0 + turn)
        step = moved.offsets()[0]  # the same for all
        force = 0.5
        moved.merge([force] * 2, how)
        before = centers[-2] if len(centers) > 1 else centers[-1]
        close(moved.center, centers[-1] + step + 0.5 * (centers[-1] - before))
        centers.append(moved.center)
    plain.merge([0.5] * 2, how)
    close(plain.center, centers[0] + 1.0 + 2.0 + 3.0)


@pytest.mark.parametrize("compression", COMPRESSIONS[:2], ids=repr)
def test_nonfinite_replica_becomes_the_center_after_pull(compression: Any) -> None:
    """Regression: the replica became the center from before the merge."""
    world = World(3, compression, momentum=0.5)
    world.train()
    with torch.no_grad():
        world.replicas[1].parameters[1][2] = float("nan")
    start = world.center
    assert world.merge([0.3, 0.0, 0.3], how="pull") == [True, False, True]
    assert not torch.equal(world.center, start)
    assert torch.equal(flat(world.replicas[1].parameters), world.center)
    assert [replica.was_center for replica in world.replicas] == [False, True, False]


def test_nonfinite_replica_becomes_the_center_after_merge() -> None:
    for compression in COMPRESSIONS[:2]:
        world = World(3, compression)
        world.train()
        weights = [0.5, 0.0, 0.5]
        with torch.no_grad():
            world.replicas[1].parameters[1][2] = float("nan")
        offsets = world.offsets()
        start = world.center
        assert world.merge(weights) == [True, False, True]
        assert torch.equal(flat(world.replicas[1].parameters), world.center)
        left = sum(0.5 * world.offsets()[rank] for rank in (0, 2))
        close(world.center + left, start + 0.5 * offsets[0] + 0.5 * offsets[2])


@pytest.mark.parametrize("how", ["merge", "pull"])
@pytest.mark.parametrize(
    "compression",
    [
        hvd.Compression.gtopk(density=0.2, values="int3"),
        hvd.Compression.oktopk(density=0.2, values="int4"),
        hvd.Compression.hierarchical(density=0.2, inside="dense", node_size=2),
    ],
    ids=repr,
)
def test_entries_of_others_that_return_to_a_lost_replica_are_conserved(
    compression: Any, how: str
) -> None:
    world = World(4, compression)
    world.train()
    with torch.no_grad():
        world.replicas[1].parameters[1][2] = float("nan")
    weights = [0.3, 0.0, 0.3, 0.4] if how == "merge" else [0.2, 0.0, 0.2, 0.2]
    factors = weights if how == "merge" else [1.0, 0.0, 1.0, 1.0]
    mean = [factor * world.offsets()[rank] for rank, factor in enumerate(factors) if factor]
    start = world.center
    world.merge(weights, how)
    assert not world.replicas[1].was_center
    factors[1] = 0.25 if how == "merge" else 1.0  # the share of an equal weight
    left = sum(factor * o for factor, o in zip(factors, world.offsets(), strict=True))
    # Elastic replicas stay where they are, while the center moves.
    moved = world.center - start if how == "merge" else 4 * (world.center - start)
    close(moved + left, sum(mean))


def test_overflowing_sum_resets_all_replicas_to_the_center() -> None:
    world = World(2, hvd.Compression.none)
    start = world.center
    for replica in world.replicas:
        with torch.no_grad():
            replica.parameters[0][0, 0] = 1.7e308
    world.merge([0.9, 0.9])  # no rank's offset overflows, their sum does
    assert all(torch.equal(flat(replica.parameters), start) for replica in world.replicas)


def test_collapse_moves_all_offsets_into_the_center() -> None:
    world = World(3, hvd.Compression.gtopk(density=0.1))
    world.train()
    weights = weights_of(3, 0)
    pairs = zip(weights, world.offsets(), strict=True)
    expected = world.center + sum(weight * offset for weight, offset in pairs)
    world.merge(weights)
    parts = [
        replica.weighted_offset(weight)
        for replica, weight in zip(world.replicas, weights, strict=True)
    ]
    for replica in world.replicas:
        replica.collapse(sum(parts))
    for replica in world.replicas:
        close(flat(replica.parameters), expected)
        assert torch.equal(flat(replica.parameters), flat(replica.center))


@pytest.mark.parametrize("compression", COMPRESSIONS[:2], ids=repr)
def test_replica_resumes_from_checkpoint_bitwise(compression: Any) -> None:
    world, other = World(2, compression, 0.9), World(2, compression, 0.9)
    for _ in range(2):
        world.train()
        world.merge([0.5, 0.5])
    other.train()
    for replica, fresh in zip(world.replicas, other.replicas, strict=True):
        fresh.load_state_dict(replica.state_dict())
    other._noise.set_state(world._noise.get_state())
    for each in (world, other):
        each.train()
        each.merge([0.25, 0.75])
    for replica, fresh in zip(world.replicas, other.replicas, strict=True):
        assert torch.equal(flat(replica.parameters), flat(fresh.parameters))
        assert torch.equal(flat(replica.center), flat(fresh.center))


def test_at_center_shows_the_center_and_restores_the_replica() -> None:
    world = World(2, hvd.Compression.gtopk(density=0.1))
    world.train()
    world.merge([0.5, 0.5])
    own = flat(world.replicas[0].parameters)
    assert not torch.equal(own, world.center)
    with world.replicas[0].at_center():
        assert torch.equal(flat(world.replicas[0].parameters), world.center)
    assert torch.equal(flat(world.replicas[0].parameters), own)


def at_center_of(world: World, within: bool) -> ExitStack:
    """Put all replicas at the center within the context, if `within`."""
    stack = ExitStack()
    for replica in world.replicas if within else ():
        stack.enter_context(replica.at_center())
    return stack


@pytest.mark.parametrize("how", ["merge", "pull"])
def test_state_and_merge_within_at_center_use_the_replicas_own_values(how: str) -> None:
    """Regression: the replica's state became the center's, so a merge lost the offset."""
    found = []
    for within in (False, True):
        world = World(2, hvd.Compression.gtopk(density=0.1), momentum=0.5)
        world.train()
        world.merge([0.5, 0.5], how)
        world.train()
        with at_center_of(world, within):
            taken = [world.offsets()[0], torch.tensor(world.replicas[0].norm())]
            taken += world.replicas[0].state_dict()["own"]
            world.merge([0.25, 0.75], how)
            taken.append(torch.tensor(world.replicas[1].weighted_offset(0.75)))
            if within:
                assert all(torch.equal(flat(r.parameters), flat(r.center)) for r in world.replicas)
        found.append([*taken, world.center, *world.replicas[0].parameters])
    assert len(found[0]) == len(found[1]) == 3 + 2 * len(SHAPES) + 1
    assert all(map(torch.equal, *found))


def test_collapse_within_at_center_is_kept() -> None:
    world = World(2, hvd.Compression.gtopk(density=0.1))
    world.train()
    world.merge([0.5, 0.5])
    replica = world.replicas[0]
    with replica.at_center(), replica.at_center():
        replica.collapse(replica.weighted_offset(0.5))
        moved = flat(replica.center)
        assert torch.equal(flat(replica.parameters), moved)
    assert not torch.equal(moved, flat(world.replicas[1].center))
    assert torch.equal(flat(replica.parameters), moved)


def test_state_loaded_within_at_center_is_kept() -> None:
    world, other = (World(2, hvd.Compression.gtopk(density=0.1)) for _ in range(2))
    for each in (world, other, other):
        each.train()
        each.merge([0.5, 0.5])
    replica = world.replicas[0]
    with replica.at_center():
        replica.load_state_dict(other.replicas[0].state_dict())
        assert torch.equal(flat(replica.parameters), other.center)
    assert torch.equal(flat(replica.parameters), flat(other.replicas[0].parameters))

"""Dense sums inside a node keep the laws of all sparse exchanges."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from collectives.transports import LocalTransport
from gtopk.compression import Compression
from gtopk.optim.distributed import DistributedOptimizer
from gtopk.reduce_ops import Sum
from gtopk.runtime.world import world

NODES = [[0, 1], [2, 3, 4]]
ELEMENTS = 300


def on_nodes(transport: LocalTransport, nodes: list[list[int]]) -> LocalTransport:
    """Make the ranks of a node the ranks of a host."""
    node = next(node for node in nodes if transport.rank in node)
    transport.neighbours = lambda: node  # type: ignore[method-assign]
    return transport


def gradient_of(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(ELEMENTS, generator=generator, dtype=torch.float64)


def residual_of(optimizer: Any) -> torch.Tensor:
    """Return a rank's residual, after a step."""
    state = optimizer.state_dict()["gtopk"]
    (held,) = state["held"].values()
    return next(iter(held.values()))["residual"]


def steps(
    transport: LocalTransport, nodes: list[list[int]], compression: Any, count: int = 6
) -> tuple[list[torch.Tensor], list[torch.Tensor], dict[str, Any]]:
    """Return the updates, the residual after each step, and the final state."""
    parameter = torch.nn.Parameter(torch.zeros(ELEMENTS, dtype=torch.float64))
    updates, held = [], []
    with world.entered(on_nodes(transport, nodes)):
        optimizer = DistributedOptimizer(
            torch.optim.SGD([parameter], lr=1.0), compression=compression, op=Sum
        )
        for step in range(count):
            parameter.grad = gradient_of(transport.rank, step)
            optimizer.step()
            updates.append(parameter.grad.clone())
            held.append(residual_of(optimizer).clone())
        return updates, held, optimizer.state_dict()


@pytest.mark.parametrize("across", ["gtopk", "oktopk"])
def test_gradient_mass_is_conserved(threads, across):
    compression = Compression.hierarchical(0.1, inside="dense", across=across, values="bf16")
    ranks = threads(5, lambda transport: steps(transport, NODES, compression))
    for step in range(6):
        update = ranks[0][0][step]
        assert all(torch.equal(update, updates[step]) for updates, _, _ in ranks)
        widest = 2 if across == "gtopk" else 1
        assert 0 < int((update != 0).sum()) <= widest * 0.1 * ELEMENTS
        before = sum(held[step - 1] for _, held, _ in ranks) if step else 0.0
        after = sum(held[step] for _, held, _ in ranks)
        given = sum(gradient_of(rank, step) for rank in range(5))
        torch.testing.assert_close(update + after, before + given, rtol=1e-12, atol=1e-12)


def test_residual_of_a_rank_covers_only_its_shard(threads):
    compression = Compression.hierarchical(0.1, inside="dense")
    ranks = threads(5, lambda transport: steps(transport, NODES, compression, 1))
    halves = [held[0].reshape(2, -1).abs().sum(1) > 0 for _, held, _ in ranks]
    # The smaller node has two ranks, so there are two shards; rank 4 owns none.
    owned = [half.tolist() for half in halves]
    assert owned == [[True, False], [False, True], [True, False], [False, True], [False, False]]


def test_one_rank_per_node_is_bit_identical_to_gtopk(threads):
    alone = [[rank] for rank in range(4)]
    dense = Compression.hierarchical(0.1, inside="dense")
    by_node = threads(4, lambda transport: steps(transport, alone, dense))
    flat = threads(4, lambda transport: steps(transport, alone, Compression.gtopk(0.1)))
    for (updates, held, _), (flat_updates, flat_held, _) in zip(by_node, flat, strict=True):
        assert all(map(torch.equal, updates, flat_updates))
        assert all(map(torch.equal, held, flat_held))


@pytest.mark.parametrize("inside", ["picks", "dense"])
def test_node_size_equals_hosts_of_that_many_ranks(threads, inside):
    hosts = [[0, 1, 2], [3, 4]]
    by_host = Compression.hierarchical(0.1, inside=inside)
    by_number = Compression.hierarchical(0.1, inside=inside, node_size=3)
    everyone = [list(range(5))]
    as_hosts = threads(5, lambda transport: steps(transport, hosts, by_host, 3)[:2])
    counted = threads(5, lambda transport: steps(transport, everyone, by_number, 3)[:2])
    for (updates, held), (same_updates, same_held) in zip(as_hosts, counted, strict=True):
        assert all(map(torch.equal, updates, same_updates))
        assert all(map(torch.equal, held, same_held))


def test_residuals_of_former_shards_are_sent_by_their_new_owners(threads):
    compression = Compression.hierarchical(0.1, inside="dense")
    before = threads(5, lambda transport: steps(transport, NODES, compression))
    parts: dict[int, Any] = {}
    for _, _, state in before:
        parts |= state["gtopk"]["held"]
    saved = {**before[0][2], "gtopk": {**before[0][2]["gtopk"], "held": parts}}
    total = sum(held[-1] for _, held, _ in before)

    def resumed(transport: LocalTransport) -> tuple[torch.Tensor, torch.Tensor]:
        parameter = torch.nn.Parameter(torch.zeros(ELEMENTS, dtype=torch.float64))
        with world.entered(on_nodes(transport, [[0, 1, 2]])):
            optimizer = DistributedOptimizer(
                torch.optim.SGD([parameter], lr=1.0), compression=compression, op=Sum
            )
            optimizer.load_state_dict(saved)
            parameter.grad = gradient_of(transport.rank, 9)
            optimizer.step()
            return parameter.grad.clone(), residual_of(optimizer).clone()

    after = threads(3, resumed)
    given = sum(gradient_of(rank, 9) for rank in range(3))
    now = after[0][0] + sum(held for _, held in after)
    torch.testing.assert_close(now, total + given, rtol=1e-12, atol=1e-12)
    shards = [held.reshape(3, -1).abs().sum(1) > 0 for _, held in after]
    assert torch.stack(shards).tolist() == torch.eye(3, dtype=torch.bool).tolist()


def test_momentum_applies_to_the_nodes_sum(threads):
    """If all entries are sent, updates are the velocity of the sum of gradients."""
    compression = Compression.hierarchical(1.0, inside="dense", momentum_correction=0.5)
    ranks = threads(4, lambda t: steps(t, [[0, 1], [2, 3]], compression, 3))
    velocity = torch.zeros(ELEMENTS, dtype=torch.float64)
    for step in range(3):
        velocity = 0.5 * velocity + sum(gradient_of(rank, step) for rank in range(4))
        for updates, _, _ in ranks:
            torch.testing.assert_close(updates[step], velocity, rtol=1e-12, atol=1e-12)


def loaded(transport: LocalTransport, compression: Any, held: dict[str, torch.Tensor]) -> Any:
    """Return an optimizer of 8 values with this residual on its rank, in a run of two."""
    parameter = torch.nn.Parameter(torch.zeros(8, dtype=torch.float64))
    optimizer = DistributedOptimizer(
        torch.optim.SGD([parameter], lr=1.0), [("w", parameter)], compression
    )
    part = {"format": 1, "ranks": 2, "steps": 5, "lanes": [], "held": {transport.rank: {"w": held}}}
    optimizer.load_state_dict({**optimizer.state_dict(), "gtopk": part})
    return optimizer


@pytest.mark.parametrize("holder", [0, 1])
def test_residual_of_another_shard_adds_no_momentum(threads, holder):
    """It waits while another entry is larger, and counts once, whichever rank has it."""
    compression = Compression.hierarchical(
        1 / 8, inside="dense", momentum_correction=0.5, node_size=2
    )

    def program(transport: LocalTransport) -> torch.Tensor:
        held = torch.zeros(8, dtype=torch.float64)
        held[0] = 1.0 if transport.rank == holder else 0.0
        applied = torch.zeros_like(held)
        with world.entered(transport):
            optimizer = loaded(transport, compression, {"residual": held})
            (parameter,) = optimizer._parameter_names
            for step in range(30):
                parameter.grad = torch.zeros_like(parameter)
                parameter.grad[1] = 1000.0 if step < 10 else 0.0
                optimizer.step()
                applied += parameter.grad
        return applied

    assert [applied[0] for applied in threads(2, program)] == [1.0, 1.0]


@pytest.mark.parametrize("masked", [False, True])
def test_velocity_of_other_shards_moves_to_their_owners(threads, masked):
    compression = Compression.hierarchical(
        1.0, inside="dense", momentum_correction=0.5, factor_masking=masked, node_size=2
    )

    def program(transport: LocalTransport) -> tuple[torch.Tensor, torch.Tensor]:
        velocity = torch.arange(8.0).double() * (1 + transport.rank)
        nothing = torch.zeros_like(velocity)
        with world.entered(transport):
            optimizer = loaded(transport, compression, {"residual": nothing, "velocity": velocity})
            (parameter,) = optimizer._parameter_names
            parameter.grad = nothing.clone()
            parameter.grad[7] = torch.nan  # skipped: this step must change nothing
            optimizer.step()
            assert optimizer.skipped_steps == 1
            parameter.grad = nothing.clone()
            optimizer.step()
            (held,) = optimizer.state_dict()["gtopk"]["held"].values()
            return parameter.grad.clone(), held["w"]["velocity"]

    (update, low), (_, high) = threads(2, program)
    moved = 0.5 * 3 * torch.arange(8.0).double()
    torch.testing.assert_close(update, moved)
    kept = torch.zeros_like(moved) if masked else moved  # all was applied
    torch.testing.assert_close(low, torch.cat([kept[:4], torch.zeros(4).double()]))
    torch.testing.assert_close(high, torch.cat([torch.zeros(4).double(), kept[4:]]))


def test_rounding_error_stays_in_residuals_of_the_first_nodes_owners(threads):
    compression = Compression.hierarchical(1.0, inside="dense")

    def program(transport: LocalTransport) -> tuple[torch.Tensor, ...]:
        parameter = torch.nn.Parameter(torch.zeros(ELEMENTS, dtype=torch.bfloat16))
        with world.entered(on_nodes(transport, NODES)):
            optimizer = DistributedOptimizer(
                torch.optim.SGD([parameter], lr=1.0), compression=compression, op=Sum
            )
            parameter.grad = given = gradient_of(transport.rank, 0).bfloat16()
            given = given.double()
            optimizer.step()
            return given, parameter.grad.double(), residual_of(optimizer).double()

    given, updates, held = zip(*threads(5, program), strict=True)
    torch.testing.assert_close(updates[0] + sum(held), sum(given), rtol=0, atol=1e-5)
    owned = [[bool(half.any()) for half in one.reshape(2, -1)] for one in held]
    assert owned == [[True, False], [False, True], *[[False, False]] * 3]


def test_nonfinite_gradient_leaves_residuals_unchanged(threads):
    compression = Compression.hierarchical(0.1, inside="dense")

    def program(transport: LocalTransport) -> tuple[torch.Tensor, torch.Tensor]:
        parameter = torch.nn.Parameter(torch.zeros(ELEMENTS, dtype=torch.float64))
        with world.entered(on_nodes(transport, NODES)):
            optimizer = DistributedOptimizer(
                torch.optim.SGD([parameter], lr=1.0), compression=compression, op=Sum
            )
            for step in range(2):
                parameter.grad = gradient_of(transport.rank, step)
                optimizer.step()
            before = residual_of(optimizer).clone()
            parameter.grad = gradient_of(transport.rank, 2)
            if transport.rank == 3:
                parameter.grad[7] = float("nan")
            optimizer.step()
            return before, residual_of(optimizer).clone()

    for before, after in threads(5, program):
        assert torch.equal(before, after)

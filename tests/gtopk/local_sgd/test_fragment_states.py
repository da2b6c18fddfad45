"""LocalSGD with fragments resumes bit-identically from a state, on all ranks as on the root."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import gtopk.torch as hvd
from collectives.transports import LocalTransport, local_world, run_ranks
from gtopk.local_sgd import LocalSGD
from gtopk.runtime.world import world
from gtopk.torch.elastic import TorchState
from tests.gtopk.local_rounds import (
    PARTS,
    close,
    copied,
    flat,
    held,
    in_fragments,
    network,
    on_ranks,
    train,
    weights,
)


@pytest.mark.parametrize("overlap", [0, 2, 4])
@pytest.mark.parametrize(
    "compression",
    [hvd.Compression.gtopk(density=0.1, warmup_steps=3), hvd.Compression.shards(3, 3)],
    ids=repr,
)
def test_run_resumed_from_any_step_is_bit_identical(compression: Any, overlap: int) -> None:
    def rank(transport: LocalTransport) -> None:
        full_model, full_run = in_fragments(overlap, compression)
        train(transport.rank, full_model, full_run, range(13))
        for stop in (2, 3, 5, 6):
            model, optimizer = in_fragments(overlap, compression)
            train(transport.rank, model, optimizer, range(stop))
            saved = copied(model, optimizer)
            train(transport.rank, model, optimizer, range(stop, 13))
            # Asking for a state changed nothing.
            assert torch.equal(weights(model), weights(full_model))
            other, resumed = in_fragments(overlap, compression)
            train(transport.rank, other, resumed, range(3))  # discarded
            other.load_state_dict(saved[0])
            resumed.load_state_dict(saved[1])
            train(transport.rank, other, resumed, range(stop, 13))
            assert torch.equal(weights(other), weights(full_model))
            assert torch.equal(held(resumed), held(full_run))
            assert resumed.outer_steps == full_run.outer_steps

    on_ranks(2, rank)


@pytest.mark.parametrize(("ranks", "fragments"), [(2, 3), (4, 3), (3, 2), (3, 1)])
def test_other_ranks_or_fragments_restart_from_the_centers(
    ranks: int, fragments: int, caplog: pytest.LogCaptureFixture
) -> None:
    def saving(transport: LocalTransport) -> tuple[Any, ...]:
        model, optimizer = in_fragments()
        train(transport.rank, model, optimizer, range(6))
        return *copied(model, optimizer), [part.center for part in optimizer._fragments]

    models, states, centers = zip(*on_ranks(3, saving), strict=True)
    together = {rank: part for state in states for rank, part in state["gtopk"]["held"].items()}
    total = sum(flat(part["residual"] for part in one.values()) for one in together.values())
    by_place = {
        n: z
        for part, zs in zip(PARTS[3], centers[0], strict=True)
        for n, z in zip(part, zs, strict=True)
    }

    def loading(transport: LocalTransport) -> tuple[torch.Tensor, torch.Tensor]:
        model, optimizer = in_fragments(fragments=fragments)
        model.load_state_dict(models[0])
        state = {**states[0], "gtopk": {**states[0]["gtopk"], "held": together}}
        optimizer.load_state_dict(copy.deepcopy(state))  # ranks are threads here
        close(weights(model), flat(by_place[n] for n in range(4)))
        residuals = held(optimizer)
        train(transport.rank, model, optimizer, range(6, 13))
        optimizer.outer_step()
        return residuals, weights(model)

    residuals, after = zip(*on_ranks(ranks, loading), strict=True)
    close(sum(residuals), total)
    assert all(torch.equal(each, after[0]) for each in after)
    assert (
        f"the state was saved by 3 ranks in the middle of a round, and now there are {ranks}"
        in caplog.text
    )
    assert ("with other fragments" in caplog.text) == (fragments != 3)


def test_old_state_without_fragments_loads_as_one_fragment() -> None:
    def rank(transport: LocalTransport) -> None:
        model, optimizer = in_fragments(fragments=1)
        train(transport.rank, model, optimizer, range(6))
        saved = copied(model, optimizer)
        train(transport.rank, model, optimizer, range(6, 10))
        for name in ("places", "early", "other_fragments"):
            del saved[1]["local_sgd"][name]
        for record in saved[1]["gtopk"]["lanes"]:
            del record["steps"]
        other, resumed = in_fragments(fragments=1)
        other.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
        train(transport.rank, other, resumed, range(6, 10))
        assert torch.equal(weights(other), weights(model))

    on_ranks(2, rank)


@pytest.mark.parametrize("way", ["set", "loaded", "broadcast"])
@pytest.mark.parametrize(("before", "after"), [(8, 4), (4, 8), (6, 9)])
def test_fragments_take_turns_after_inner_steps_changed(before: int, after: int, way: str) -> None:
    def rank(transport: LocalTransport) -> None:
        def build(inner_steps: int) -> tuple[torch.nn.Module, Any]:
            model = network()
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            return model, LocalSGD(inner, inner_steps, fragments=4)

        model, optimizer = build(before)
        train(transport.rank, model, optimizer, range(11))
        if way == "set":
            optimizer.inner_steps = after
        else:
            saved = copied(model, optimizer)
            model, optimizer = build(after)
            if way == "loaded" or transport.rank == 0:
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
            if way == "broadcast":
                hvd.broadcast_parameters(model.state_dict(), 0)
                hvd.broadcast_optimizer_state(optimizer, 0)
        counts = []
        for step in range(2 * after):
            so_far = optimizer.outer_steps
            train(transport.rank, model, optimizer, [step])
            counts.append(optimizer.outer_steps - so_far)
        ends = [-(-after * number // 4) for number in range(1, 9)]
        assert counts == [ends.count(step) for step in range(1, 2 * after + 1)]

    on_ranks(2, rank)


@pytest.mark.parametrize("overlap", [0, 2])
def test_broadcast_state_makes_all_ranks_continue_as_the_root(overlap: int) -> None:
    def rank(transport: LocalTransport) -> torch.Tensor:
        model, optimizer = in_fragments(overlap)
        train(transport.rank, model, optimizer, range(5))
        saved = copied(model, optimizer)
        model, optimizer = in_fragments(overlap)
        if transport.rank == 0:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        hvd.broadcast_parameters(model.state_dict(), 0)
        hvd.broadcast_optimizer_state(optimizer, 0)
        own = hvd.broadcast_object(copied(model, optimizer)[1]["local_sgd"], 0)
        assert [p.early for p in optimizer._fragments] == [
            0,
            0,
            own["other_fragments"][-1]["early"],
        ]
        train(transport.rank, model, optimizer, range(5, 10))
        optimizer.outer_step()
        return weights(model)

    first, *others = on_ranks(3, rank)
    assert all(torch.equal(first, each) for each in others)


@pytest.mark.parametrize(
    ("fragments", "layers", "message"),
    [
        ((2, 3), ("0123", "0123"), "rank 1 has fragments=3, rank 0 has fragments=2"),
        ((2, 2), ("0011", "0123"), "rank 1 has parameter 1 in fragment 1, rank 0 has .* 0$"),
    ],
)
def test_unequal_fragments_make_a_state_broadcast_raise_on_every_rank(
    fragments: tuple[int, int], layers: tuple[str, str], message: str
) -> None:
    def rank(transport: LocalTransport) -> None:
        parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(4)]
        names = [f"{layer}.{place}" for place, layer in enumerate(layers[transport.rank])]
        optimizer = LocalSGD(
            torch.optim.SGD(parameters, lr=0.1),
            4,
            fragments=fragments[transport.rank],
            named_parameters=zip(names, parameters, strict=True),
        )
        with pytest.raises(ValueError, match=message):
            hvd.broadcast_optimizer_state(optimizer, 0)

    on_ranks(2, rank)


def test_elastic_recovery_between_fragment_exchanges_keeps_residuals() -> None:
    def rank(transport: LocalTransport) -> torch.Tensor:
        model, optimizer = in_fragments()
        state = TorchState(model, optimizer)
        state.sync()
        train(transport.rank, model, optimizer, range(5))
        state.commit()
        own_residual = held(optimizer)
        train(transport.rank, model, optimizer, range(5, 7))
        state.restore()
        state.sync()
        assert torch.equal(held(optimizer), own_residual)
        train(transport.rank, model, optimizer, range(5, 12))
        optimizer.outer_step()
        return weights(model)

    first, *others = on_ranks(3, rank)
    assert all(torch.equal(first, each) for each in others)


@pytest.mark.parametrize("overlap", [0, 3])
def test_fragments_continue_in_the_next_world(overlap: int) -> None:
    """Bit-identically; an exchange in progress only ends sooner."""
    later = local_world(2, timeout_seconds=20)

    def rank(transport: LocalTransport) -> tuple[torch.Tensor, torch.Tensor]:
        with world.entered(transport):
            full_model, full_run = in_fragments(overlap)
            train(transport.rank, full_model, full_run, range(11))
            full_run.outer_step()
            model, optimizer = in_fragments(overlap)
            train(transport.rank, model, optimizer, range(6))
        with world.entered(later[transport.rank]):
            train(transport.rank, model, optimizer, range(6, 11))
            optimizer.outer_step()
            assert optimizer.outer_steps == full_run.outer_steps
            return weights(model), weights(full_model)

    models, full_models = zip(*run_ranks(local_world(2, timeout_seconds=20), rank), strict=True)
    assert torch.equal(*models)
    assert torch.equal(models[0], full_models[0]) == (overlap == 0)

"""A loader continues in the new world after a failure, or raises with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import gtopk
import gtopk.torch as hvd
from collectives.transports import LocalTransport, local_world, run_ranks
from gtopk.runtime.world import world
from gtopk.runtime.world.membership import World
from tests.gtopk.adaptive.indices import Indices
from tests.gtopk.adaptive.modelled_ranks import Modelled

LENGTH = 101


def in_turn(sizes: list[int], *programs: Callable[[World, Any], Any]) -> list[Any]:
    """Run each program in its own world, with the result of the previous one."""
    worlds = [local_world(size, timeout_seconds=30) for size in sizes]

    def rank(transport: LocalTransport) -> Any:
        result = None
        for ranks, program in zip(worlds, programs, strict=True):
            if transport.rank < len(ranks):
                with world.entered(ranks[transport.rank]) as here:
                    result = program(here, result)
        return result

    return run_ranks(local_world(max(sizes)), rank)


def distribute(weight: torch.Tensor) -> Any:
    return hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.001), [("weight", weight)])


def open_loader(here: World, before: Any = None, mode: str = "balanced", **options: Any) -> Any:
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = distribute(weight)
    loader = DataLoader(Indices(LENGTH), 4, shuffle=True)
    return weight, optimizer, hvd.adapt(loader, optimizer, mode, **options)


def steps(weight: torch.Tensor, optimizer: Any, loader: Any) -> Iterator[list[int]]:
    """Train an epoch, and yield the samples of each batch after its step."""
    for batch in loader:
        optimizer.zero_grad()
        (weight * batch.double().mean()).sum().backward()
        optimizer.step()
        yield batch.tolist() if loader.num_samples else []


@pytest.mark.parametrize("fails_at", [0, 4, 7])
def test_balanced_loader_continues_after_failure_with_ranks_a_step_apart(fails_at: int) -> None:
    ranks = 3

    def fails(here: World, before: None) -> Any:
        options = {
            "interval": 1,
            "min_batch": 1,
            "noise_every": 3,
            "timer": Modelled(1 + here.rank),
        }
        opened = open_loader(here, **options)
        with suppress(hvd.HorovodInternalError):
            for number, _ in enumerate(steps(*opened)):
                if here.rank == 1 and number == fails_at:
                    break  # the others continue to the next batch, or to agreeing on its size
        return opened

    def continues(here: World, opened: Any) -> Any:
        loader, epochs, sizes = opened[-1], [], []
        for _ in range(2):
            epochs.append([])
            for samples in steps(*opened):
                epochs[-1].append(samples)
                sizes.append(loader.sizes)
        return epochs, sizes, loader.state_dict()

    results = in_turn([ranks, ranks], fails, continues)
    for epoch in range(2):
        batches = [epochs[epoch] for epochs, *_ in results]
        assert sorted(i for each in batches for batch in each for i in batch) == list(range(LENGTH))
        order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(epoch)).tolist()
        assert [i for each in batches for i in each[0]] == order[:12]  # the one cut off, all of it
    for _, sizes, state in results:
        assert sizes == results[0][1]
        assert state["controller"] == results[0][2]["controller"]
        assert state["epochs"] == {"epoch": 2, "start": 0}
    assert len(set(map(tuple, results[0][1]))) > 1


HOSTS_REMOVED, HOSTS_ADDED = 1, 2


@pytest.mark.parametrize("what", ["failure", HOSTS_ADDED, HOSTS_REMOVED])
def test_balanced_loader_in_elastic_state_continues_within_epoch(what: Any) -> None:
    """It restores a commit, or copies rank 0's state to all ranks, or does neither."""
    ranks = 2
    worlds = [local_world(ranks, timeout_seconds=30) for _ in range(2)]

    def program(transport: LocalTransport) -> list[list[int]]:
        with ExitStack() as stack:

            def enter() -> World:
                stack.close()
                return stack.enter_context(world.entered(worlds[len(begun)][transport.rank]))

            begun: list[int] = []
            opened = open_loader(enter())
            state = hvd.elastic.TorchState(None, opened[1], loader=opened[-1], done=0)
            trained: dict[int, list[int]] = {}

            def train(state: Any) -> None:
                begun.append(state.done)
                for samples in steps(*opened):
                    trained[state.done] = samples
                    state.done += 1
                    if state.done == 3 and len(begun) == 1 and what != "failure":
                        state.on_hosts_updated(1.0, what)
                    if state.done % 3 == 0:
                        state.commit()
                    if state.done == 5 and len(begun) == 1:
                        raise hvd.HorovodInternalError("made up")

            hvd.elastic.run_fn(train, enter)(state)
            assert begun == [0, 3]
            assert opened[-1].state_dict()["epochs"] == {"epoch": 1, "start": 0}
            return list(trained.values())

    batches = run_ranks(local_world(ranks), program)
    samples = sorted(i for each in batches for batch in each for i in batch)
    assert samples == list(range(LENGTH))


def test_balanced_loader_raises_after_number_of_ranks_changed() -> None:
    def continues(here: World, opened: Any) -> str:
        with pytest.raises(
            RuntimeError, match="created on rank 0 of 2 but now runs on rank 0 of 1"
        ) as error:
            next(iter(opened[-1]))
        assert not isinstance(error.value, hvd.HorovodInternalError)
        return ""

    in_turn([2, 1], open_loader, continues)


@pytest.mark.parametrize(
    ("mode", "way_out"),
    [
        ("abs", "create it and its DistributedOptimizer again, as within the function that hvd"),
        ("adaptive-sgd", "create it and its DistributedOptimizer again"),
        ("hogbatch", "resume from a checkpoint in another job"),
    ],
)
def test_modes_that_cannot_continue_in_a_new_world_raise_with_the_way_out(
    mode: str, way_out: str
) -> None:
    options = {"device_class": "slow", "sizes": {"slow": 4}} if mode == "hogbatch" else {}

    def trains(here: World, before: None) -> Any:
        opened = open_loader(here, mode=mode, **options)
        list(steps(*opened))
        return opened

    def continues(here: World, opened: Any) -> list[list[int]] | None:
        weight, _, loader = opened
        message = f"in mode '{mode}' cannot continue after .*: {way_out}"
        with pytest.raises(RuntimeError, match=message) as error:
            next(iter(loader))
        assert not isinstance(error.value, hvd.HorovodInternalError)  # elastic must not retry
        if mode == "hogbatch":
            return None
        optimizer = distribute(weight)
        new_loader = hvd.adapt(DataLoader(Indices(LENGTH), 4, shuffle=True), optimizer, mode)
        return list(steps(weight, optimizer, new_loader))

    results = in_turn([2, 2], trains, continues)
    if mode != "hogbatch":
        samples = sorted(i for batches in results for batch in batches for i in batch)
        assert samples == list(range(LENGTH))


def test_hogbatch_loader_of_an_ended_world_saves_checkpoint_for_another_job(tmp_path: Path) -> None:
    def opens(here: World) -> Any:
        kind = "fast" if here.rank else "slow"  # a fast worker's parameters are a copy
        sizes = {"slow": 4, "fast": 4}
        return open_loader(here, mode="hogbatch", device_class=kind, sizes=sizes)

    def trains(here: World, before: None) -> Any:
        opened = opens(here)
        list(steps(*opened))
        return opened

    def saves(here: World, opened: Any) -> Any:
        weight, optimizer, loader = opened
        loader.drain()
        model = torch.nn.ParameterList([weight])
        gtopk.save_checkpoint(tmp_path, model, optimizer, loader, 1)
        with pytest.raises(RuntimeError, match="resume from a checkpoint in another job"):
            loader.evaluate(lambda batch: (weight * batch.double().mean()).sum())
        return weight.detach().clone()

    def continues(here: World, saved: torch.Tensor) -> Any:
        weight, optimizer, loader = opens(here)
        gtopk.load_latest(tmp_path, torch.nn.ParameterList([weight]), optimizer, loader)
        assert torch.equal(weight, saved)
        hvd.barrier()  # the slow worker's parameters are the shared model
        return saved, loader.state_dict()["epochs"], list(steps(weight, optimizer, loader))

    results = in_turn([2, 2, 2], trains, saves, continues)
    assert torch.equal(results[0][0], results[1][0])
    assert [epochs for _, epochs, _ in results] == [{"epoch": 1, "start": 0}] * 2
    samples = sorted(i for *_, batches in results for batch in batches for i in batch)
    assert samples == list(range(LENGTH))

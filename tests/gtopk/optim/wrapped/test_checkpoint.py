"""Checkpoints keep a distributed optimizer's residual, so that runs resume bit-identically."""

from __future__ import annotations

import copy
import io
import logging
import re
from typing import Any

import numpy as np
import pytest
import torch

from collectives.transports import LocalTransport
from gtopk import load_latest, save_checkpoint
from gtopk.compression import Compression
from gtopk.optim.distributed import DistributedOptimizer
from gtopk.optim.wrapped import checkpoint as optimizer_checkpoint
from gtopk.runtime.world import world
from gtopk.torch.functions import broadcast_optimizer_state
from tests.gtopk.held import held

KINDS = [
    Compression.none,
    Compression.gtopk(0.2),
    Compression.gtopk(0.05, momentum_correction=0.5, warmup_steps=6),
    Compression.oktopk(0.2, values="bf16"),
    Compression.gtopk(0.2, dense="bias"),
    Compression.gtopk(0.05, dense="bias", adam_correction=(0.9, 0.99)),
]


def network() -> torch.nn.Sequential:
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last),
        torch.nn.Flatten(),
        torch.nn.Linear(12, 5),
        torch.nn.Linear(5, 3),
    )
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3, generator=generator)
    return model


def distribute(model: torch.nn.Module, compression: Any, **options: Any) -> Any:
    return DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        compression,
        **{"bucket_bytes": 100, **options},
    )


def take_steps(model: torch.nn.Module, optimizer: Any, rank: int, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(4, 2, 4, 4, generator=generator)).square().mean().backward()
        optimizer.step()


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def save_and_load(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("compression", KINDS, ids=repr)
@pytest.mark.parametrize("gathered", [False, True])
def test_resumed_run_is_bit_identical(threads, compression, gathered):
    size = 3

    def uninterrupted(transport: LocalTransport) -> Any:
        model = network()
        with world.entered(transport):
            optimizer = distribute(model, compression)
            take_steps(model, optimizer, transport.rank, range(4))
            own = optimizer.state_dict()
            state = optimizer.gather_state(1) if gathered else own
            assert (state is None) == (gathered and transport.rank != 1)
            saved = save_and_load({"model": model.state_dict(), "optimizer": state})
            take_steps(model, optimizer, transport.rank, range(4, 8))
            return flat(model), held(optimizer), saved

    def resumed(transport: LocalTransport, saved: list[Any]) -> Any:
        model = network()
        with world.entered(transport):
            optimizer = distribute(model, compression)
            model.load_state_dict(saved[transport.rank]["model"])
            optimizer.load_state_dict(saved[1 if gathered else transport.rank]["optimizer"])
            assert optimizer.state_dict()["gtopk"]["steps"] == 4
            take_steps(model, optimizer, transport.rank, range(4, 8))
            return flat(model), held(optimizer)

    finished = threads(size, uninterrupted)
    saved = [each[2] for each in finished]
    for one, other in zip(finished, threads(size, lambda t: resumed(t, saved)), strict=True):
        assert torch.equal(one[0], other[0])
        assert one[1].tobytes() == other[1].tobytes()


def test_resumed_run_of_a_clipped_adamw_is_bit_identical(threads):
    def program(transport: LocalTransport) -> None:
        def wrapped() -> tuple[Any, Any]:
            model = network()
            adamw = torch.optim.AdamW(model.parameters(), lr=0.01)
            options = {"bucket_bytes": 100, "global_clip_norm": 0.05}
            named = model.named_parameters()
            return model, DistributedOptimizer(adamw, named, Compression.gtopk(0.2), **options)

        with world.entered(transport):
            model, optimizer = wrapped()
            take_steps(model, optimizer, transport.rank, range(4))
            saved = save_and_load([model.state_dict(), optimizer.state_dict()])
            take_steps(model, optimizer, transport.rank, range(4, 8))
            resumed, again = wrapped()
            resumed.load_state_dict(saved[0])
            again.load_state_dict(saved[1])
            take_steps(resumed, again, transport.rank, range(4, 8))
            assert torch.equal(flat(resumed), flat(model))

    threads(3, program)


@pytest.mark.parametrize("compression", [Compression.none, Compression.gtopk(0.2)], ids=repr)
def test_loading_on_rank_0_alone_warns_on_the_others(threads, caplog, compression):
    """As scripts for Horovod do, which broadcast the rest of the state."""

    def program(transport: LocalTransport) -> None:
        with world.entered(transport):
            model = network()
            optimizer = distribute(model, compression)
            take_steps(model, optimizer, transport.rank, range(3))
            saved = optimizer.state_dict()
            resumed = distribute(model, compression)
            if transport.rank == 0:
                resumed.load_state_dict(saved)
            broadcast_optimizer_state(resumed, 0)
            take_steps(model, resumed, transport.rank, range(3, 5))

    threads(3, program)
    lost = sorted(text for text in caplog.messages if "has no residual" in text)
    assert len(lost) == (0 if compression == Compression.none else 2)
    for rank, text in enumerate(lost, 1):
        assert text.startswith(f"rank {rank} of 3 has no residual: rank 0 goes on from step 3")


def test_rank_that_comes_to_a_running_job_is_not_warned_of_a_residual(threads, caplog):
    kept: dict[int, Any] = {}

    def program(transport: LocalTransport) -> None:
        with world.entered(transport):
            if transport.rank not in kept:
                model = network()
                kept[transport.rank] = model, distribute(model, Compression.gtopk(0.2))
            model, optimizer = kept[transport.rank]
            broadcast_optimizer_state(optimizer, 0)
            take_steps(model, optimizer, transport.rank, range(2))

    threads(2, program)
    threads(3, program)
    assert "residual" not in caplog.text


def gathered_state(threads: Any, size: int, compression: Any) -> tuple[Any, np.ndarray]:
    def program(transport: LocalTransport) -> Any:
        model = network()
        with world.entered(transport):
            optimizer = distribute(model, compression)
            take_steps(model, optimizer, transport.rank, range(3))
            return optimizer.gather_state(), held(optimizer)

    ranks = threads(size, program)
    return ranks[0][0], sum(each[1].astype(np.float64) for each in ranks)


@pytest.mark.parametrize(("before", "after"), [(5, 2), (5, 1), (2, 5), (3, 3)])
def test_residuals_keep_their_sum_on_another_number_of_ranks(threads, caplog, before, after):
    state, total = gathered_state(threads, before, Compression.gtopk(0.1))

    def program(transport: LocalTransport) -> Any:
        model = network()
        with world.entered(transport):
            optimizer = distribute(model, Compression.gtopk(0.1))
            optimizer.load_state_dict(state)
            found = held(optimizer)
            take_steps(model, optimizer, transport.rank, range(2))
            return found

    with caplog.at_level(logging.INFO, "gtopk"):
        found = threads(after, program)
    np.testing.assert_allclose(sum(each.astype(np.float64) for each in found), total, atol=1e-6)
    assert np.abs(total).max() > 0
    messages = [r.getMessage() for r in caplog.records if "residual" in r.getMessage()]
    assert len(messages) == (0 if after == before else after)  # no message about kept residuals
    if after != before:
        assert any(
            re.search(r"rank 0 takes over the residuals? of old ranks? 0", w) for w in messages
        )


def test_loading_another_ranks_state_warns_and_loads_no_residual(threads, caplog):
    def program(transport: LocalTransport) -> Any:
        model = network()
        with world.entered(transport):
            optimizer = distribute(model, Compression.gtopk(0.1))
            take_steps(model, optimizer, transport.rank, range(2))
            states[transport.rank] = optimizer.state_dict()
            transport.barrier()
            optimizer.load_state_dict(states[0])
            return held(optimizer)

    states: dict[int, Any] = {}
    with caplog.at_level(logging.WARNING, "gtopk"):
        first, second = threads(2, program)
    assert first.any()
    assert not second.any()
    assert "gather_state" in caplog.text


def test_loading_dense_state_of_rank_0_logs_no_warning(threads, caplog):
    """As when all ranks of a Horovod script load rank 0's checkpoint."""

    def program(transport: LocalTransport) -> None:
        model = network()
        with world.entered(transport):
            optimizer = distribute(model, Compression.none)
            take_steps(model, optimizer, transport.rank, range(2))
            states[transport.rank] = optimizer.state_dict()
            transport.barrier()
            optimizer.load_state_dict(states[0])

    states: dict[int, Any] = {}
    with caplog.at_level(logging.INFO, "gtopk"):
        threads(2, program)
    assert "lost" not in caplog.text
    assert "residual" not in caplog.text


def compiled(names: Any) -> list[tuple[str, Any]]:
    """Return the names under torch.compile, of a model with compiled inner layers."""
    return [(f"_orig_mod.{name.replace('2.', '2._orig_mod.')}", p) for name, p in names]


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_run_may_be_compiled_before_or_after_a_resume(threads, caplog, before):
    def named(model: torch.nn.Module, is_compiled: bool) -> Any:
        names = model.named_parameters()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        names = compiled(names) if is_compiled else names
        return DistributedOptimizer(optimizer, names, Compression.oktopk(0.2), bucket_bytes=100)

    def program(transport: LocalTransport) -> None:
        model, other = network(), network()
        with world.entered(transport):
            optimizer = named(model, before)
            take_steps(model, optimizer, transport.rank, range(4))
            saved = save_and_load((model.state_dict(), optimizer.state_dict()))
            take_steps(model, optimizer, transport.rank, range(4, 9))
            resumed = named(other, not before)
            other.load_state_dict(saved[0])
            resumed.load_state_dict(saved[1])
            take_steps(other, resumed, transport.rank, range(4, 9))
            assert torch.equal(flat(other), flat(model))

    threads(2, program)
    assert "cannot be applied" not in caplog.text


def test_residuals_gathered_on_rank_0_are_saved_once(threads, tmp_path):
    """The others add only their own part, and all of it is saved."""

    def program(transport: LocalTransport) -> tuple[float, float]:
        rank, size = transport.rank, transport.size
        with world.entered(transport):
            own = {r: {"w": {"residual": torch.tensor([10.0**r])}} for r in range(size)}
            part = {"format": 1, "ranks": size, "steps": 5, "lanes": []}
            part["held"] = own if rank == 0 else {rank: own[rank]}
            save_checkpoint(tmp_path, None, None, residuals=part)
            loaded = load_latest(tmp_path, None)
            held = optimizer_checkpoint.residuals_for(loaded.values["residuals"], rank, size)
            return held["w"]["residual"].item()

    assert threads(3, program) == [1.0, 10.0, 100.0]


def test_residuals_on_several_devices_are_added_on_the_first_ones_device():
    """The root's own parts are on its GPU, gathered ones on the host; meta acts as a GPU."""
    devices = ["meta", "cpu", "cpu", "cpu"]
    held = {r: {"w": {"residual": torch.zeros(3, device=d)}} for r, d in enumerate(devices)}
    part = {"format": 1, "ranks": 4, "steps": 1, "lanes": [], "held": held}
    for rank, device in enumerate(["meta", "cpu"]):
        residuals = optimizer_checkpoint.residuals_for(part, rank, 2)
        assert residuals["w"]["residual"].device.type == device


NOTHING: dict[str, Any] = {"w": {"residual": torch.zeros(2)}}


@pytest.mark.parametrize(
    ("rank", "change", "is_warned"),
    [
        (0, {"held": {0: {}}}, True),
        (0, {"held": {0: {}}, "of": [[0], 2]}, True),
        (1, {"held": {1: {}}}, False),  # one warning is enough
        (0, {"held": {0: {}}, "steps": 0}, False),
        (0, {"held": {0: NOTHING}}, False),  # all was sent
        (2, {"held": {2: {}}, "ranks": 3, "of": [[], 2]}, False),  # fewer ranks saved it
    ],
)
def test_hook_state_without_residuals_warns_that_they_are_lost(caplog, rank, change, is_warned):
    """As when torch.distributed.checkpoint loads it into a new hook."""
    part = {"format": 1, "ranks": 2, "steps": 3, "lanes": [], **change}
    optimizer_checkpoint.residuals_for(part, rank, part["ranks"])
    assert ("lost; load it with gtopk.load_latest" in caplog.text) == is_warned


def test_compressed_optimizer_may_load_the_state_of_a_dense_one(threads, caplog):
    def program(transport: LocalTransport) -> None:
        model = network()
        with world.entered(transport):
            dense = distribute(model, Compression.none)
            take_steps(model, dense, transport.rank, range(2))
            distribute(model, Compression.gtopk(0.1)).load_state_dict(dense.state_dict())

    threads(2, program)
    assert "lost" not in caplog.text


def test_state_can_be_exchanged_with_a_plain_optimizer(threads):
    def program(transport: LocalTransport) -> None:
        model = network()
        plain = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        take_steps(model, plain, transport.rank, range(2))
        with world.entered(transport):
            optimizer = distribute(model, Compression.gtopk(0.1))
            take_steps(model, optimizer, transport.rank, range(2))
            before = held(optimizer)
            optimizer.load_state_dict(plain.state_dict())
            assert optimizer.param_groups[0]["lr"] == 0.5
            np.testing.assert_array_equal(held(optimizer), before)
            plain.load_state_dict(optimizer.state_dict())

    threads(2, program)


def test_residual_between_backward_and_step_is_that_of_the_last_step(threads):
    def program(transport: LocalTransport) -> None:
        model = network()
        with world.entered(transport):
            optimizer = distribute(model, Compression.gtopk(0.1, momentum_correction=0.5))
            take_steps(model, optimizer, transport.rank, range(3))
            before = held(optimizer), held(optimizer, "velocity")
            model(torch.ones(4, 2, 4, 4)).square().mean().backward()
            if transport.rank == 0:  # the other ranks need not know
                np.testing.assert_array_equal(held(optimizer), before[0])
                np.testing.assert_array_equal(held(optimizer, "velocity"), before[1])
            optimizer.step()
            assert (held(optimizer) != before[0]).any()

    threads(2, program)


def test_load_between_backward_and_step_undoes_early_exchanges(threads):
    def program(transport: LocalTransport, overlap: bool) -> Any:
        model = network()
        with world.entered(transport):
            optimizer = distribute(model, Compression.gtopk(0.1), overlap=overlap)
            take_steps(model, optimizer, transport.rank, range(2))
            state = save_and_load(optimizer.state_dict())
            take_steps(model, optimizer, transport.rank, range(2, 4))
            model(torch.ones(4, 2, 4, 4)).square().mean().backward()
            optimizer.load_state_dict(state)
            optimizer.step()
            return flat(model), held(optimizer)

    ways = [threads(2, lambda t, o=overlap: program(t, o)) for overlap in (True, False)]
    for one, other in zip(*ways, strict=True):
        assert torch.equal(one[0], other[0])
        assert one[1].tobytes() == other[1].tobytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda part: part.update(format=2), "format 1, got 2"),
        (lambda part: part["held"][0]["2.bias"].update(residual=torch.ones(4)), r"\[4\]"),
    ],
)
def test_state_of_another_format_or_shape_raises(threads, change, message):
    def program(transport: LocalTransport) -> None:
        model = network()
        with world.entered(transport):
            optimizer = distribute(model, Compression.gtopk(0.1))
            take_steps(model, optimizer, transport.rank, range(1))
            state = optimizer.state_dict()
            change(state["gtopk"])
            with pytest.raises(ValueError, match=message):
                optimizer.load_state_dict(state)

    threads(1, program)


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize(
    "compression",
    [
        Compression.none,
        Compression.oktopk(0.2),
        Compression.gtopk(0.05, momentum_correction=0.5, warmup_steps=9),
        Compression.gtopk(0.05, adam_correction=(0.9, 0.99)),
    ],
    ids=repr,
)
def test_all_ranks_continue_from_the_step_that_rank_0_loads(threads, compression, before):
    """As in Horovod's scripts before they broadcast, at once or after some steps."""

    def program(transport: LocalTransport) -> tuple[torch.Tensor, int]:
        model, other = network(), network()
        with world.entered(transport):
            optimizer = distribute(model, compression)
            take_steps(model, optimizer, transport.rank, range(4))
            state = copy.deepcopy(optimizer.state_dict())
            other.load_state_dict(model.state_dict())
            optimizer = distribute(other, compression)
            take_steps(other, optimizer, transport.rank, range(before))
            if transport.rank == 0:
                optimizer.load_state_dict(state)
            take_steps(other, optimizer, transport.rank, range(4, 15))
            return flat(other), optimizer._reducer.progress.steps

    ranks = threads(3, program)
    assert all(torch.equal(parameters, ranks[0][0]) for parameters, _ in ranks)
    assert [steps for _, steps in ranks] == [15] * 3


def test_state_loaded_between_steps_continues_bit_identically(threads):
    """With the buckets and regions of that state, not with the current ones."""

    def program(transport: LocalTransport) -> tuple[torch.Tensor, torch.Tensor]:
        model, compression = network(), Compression.oktopk(0.2)
        with world.entered(transport):
            optimizer = distribute(model, compression)
            take_steps(model, optimizer, transport.rank, range(7))
            state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            take_steps(model, optimizer, transport.rank, range(7, 12))
            expected = flat(model)
            model.load_state_dict(state[0])
            optimizer.load_state_dict(state[1])
            take_steps(model, optimizer, transport.rank, range(7, 12))
            return expected, flat(model)

    for expected, actual in threads(3, program):
        assert torch.equal(expected, actual)

"""Diverged replicas become bit-identical to the majority; residuals stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from collectives.errors import MismatchError
from collectives.transports import LocalTransport
from gtopk.compression import Compression
from gtopk.errors import HorovodInternalError
from gtopk.optim.distributed import DistributedOptimizer
from gtopk.optim.step_checks import Divergence, install_parameters, pack, spread_majority
from gtopk.runtime.world import world
from tests.gtopk.held import held

STEPS, EVERY = 8, 2


def network() -> torch.nn.Sequential:
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.5, generator=generator)
    return model


def flip(tensor: torch.Tensor) -> None:
    """Flip the highest mantissa bit of an element."""
    flat = tensor.detach().view(-1)
    flat.view(torch.int32)[flat.abs().argmax()] ^= 1 << 22


def content(model: torch.nn.Module, optimizer: Any) -> bytes:
    """Return the bytes of all parameters and of the optimizer's state."""
    tensors = [*model.parameters()]
    tensors += [v for p in model.parameters() for _, v in sorted(optimizer.state[p].items())]
    return b"".join(each.detach().numpy().tobytes() for each in tensors)


def train(
    transport: LocalTransport,
    spoil: Any = None,
    kind: Any = torch.optim.Adam,
    on_divergence: str = "heal",
    **options: Any,
) -> tuple[bytes, list[bytes], int]:
    """Return the final parameters and state, the residual after each step, and divergences.

    spoil: called with rank, step, model and optimizer after each backward pass.
    """
    model = network()
    residuals = []
    with world.entered(transport):
        optimizer = DistributedOptimizer(
            kind(model.parameters(), lr=0.05, **options),
            model.named_parameters(),
            Compression.gtopk(0.2),
            check_every=EVERY,
            on_divergence=on_divergence,  # type: ignore[arg-type]
            adam_steps="after",  # "before" restores parameters after each backward pass
        )
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(100 * step + transport.rank)
            optimizer.zero_grad()
            model(torch.randn(4, 5, generator=generator)).square().sum().backward()
            if spoil is not None:
                spoil(transport.rank, step, model, optimizer)
            optimizer.step()
            residuals.append(held(optimizer).tobytes())
        return content(model, optimizer), residuals, optimizer.divergences


@pytest.mark.parametrize(
    ("kind", "options"), [(torch.optim.Adam, {}), (torch.optim.SGD, {"momentum": 0.9})]
)
def test_flipped_bit_in_a_parameter_is_healed_by_the_next_check(threads, kind, options):
    """It flips after backward: no trace of it remains, and no residual changes."""

    def spoil(rank: int, step: int, model: torch.nn.Sequential, optimizer: Any) -> None:
        if rank == 2 and step == 2 * EVERY - 1:
            flip(model[2].weight)

    healed = threads(4, lambda t: train(t, spoil, kind, **options))
    untouched = threads(4, lambda t: train(t, None, kind, **options))
    assert [(end, residuals) for end, residuals, _ in healed] == [
        (end, residuals) for end, residuals, _ in untouched
    ]
    assert {end for end, _, _ in healed} == {healed[0][0]}
    assert [count for *_, count in healed] == [1] * 4
    assert [count for *_, count in untouched] == [0] * 4


def test_diverged_momentum_is_healed_with_its_parameter(threads):
    def spoil(rank: int, step: int, model: torch.nn.Sequential, optimizer: Any) -> None:
        if rank == 0 and step == EVERY:
            flip(optimizer.state[model[0].weight]["momentum_buffer"])

    ends = threads(3, lambda t: train(t, spoil, torch.optim.SGD, momentum=0.9))
    assert {end for end, _, _ in ends} == {ends[0][0]}
    assert [count for *_, count in ends] == [1] * 3  # otherwise it would diverge again


def test_ranks_diverged_in_different_parameters_are_all_healed(threads, caplog):
    def spoil(rank: int, step: int, model: torch.nn.Sequential, optimizer: Any) -> None:
        if step == EVERY - 1 and rank in (0, 2):
            flip(model[rank].bias)

    ends = threads(3, lambda t: train(t, spoil))
    assert {end for end, _, _ in ends} == {ends[0][0]}
    messages = [r.getMessage() for r in caplog.records if "are not the same at" in r.getMessage()]
    assert len(messages) == 3  # one line on every rank
    for text in messages:
        assert "at step 2: parameter '0.bias' has the checksums rank 0: " in text
        assert "; ranks 1, 2: " in text
        assert text.endswith(
            ", and 1 more; healed: ranks 0, 2 received the majority's values and optimizer state"
        )


@pytest.mark.parametrize("ranks", [2, 4])
def test_healing_without_a_majority_raises(threads, ranks):
    def spoil(rank: int, step: int, model: torch.nn.Sequential, optimizer: Any) -> None:
        if step == EVERY - 1 and rank < ranks // 2:
            flip(model[0].weight)

    def program(transport: LocalTransport) -> None:
        with pytest.raises(HorovodInternalError, match="no version has more than half") as caught:
            train(transport, spoil)
        assert "parameter '0.weight' has the checksums" in str(caught.value)

    threads(ranks, program)


def test_state_that_cannot_be_sent_raises_on_every_rank(threads):
    def spoil(rank: int, step: int, model: torch.nn.Sequential, optimizer: Any) -> None:
        if step == EVERY - 1 and rank == 1:
            flip(model[0].weight)
            optimizer.state[model[0].weight]["hook"] = spoil

    def program(transport: LocalTransport) -> None:
        with pytest.raises(HorovodInternalError, match="cannot be healed: rank 1: objects between"):
            train(transport, spoil)

    threads(3, program)


def test_on_divergence_warn_leaves_replicas_different(threads, caplog):
    def spoil(rank: int, step: int, model: torch.nn.Sequential, optimizer: Any) -> None:
        if rank == 1 and step == STEPS - 1 - EVERY:
            flip(model[0].weight)

    ends = threads(3, lambda t: train(t, spoil, on_divergence="warn"))
    assert ends[0][0] == ends[2][0] != ends[1][0]
    assert [count for *_, count in ends] == [2] * 3
    assert "rank 1: " in caplog.text
    assert "they stay different. Start with broadcast_parameters" in caplog.text


def test_majority_value_is_sent_once_to_each_rank_that_lacks_it(threads):
    def program(transport: LocalTransport) -> tuple[list[int], dict[str, bytes], int]:
        own = {"a": b"sick" if transport.rank in (0, 3) else b"well", "b": b"same"}
        before = transport.traffic.sent_messages
        ranks, mended = spread_majority(transport, own)
        sent_messages = transport.traffic.sent_messages - before
        return ranks, mended, sent_messages

    results = threads(5, program)
    assert [ranks for ranks, _, _ in results] == [[0, 3]] * 5
    assert [mended for _, mended, _ in results] == [
        {"a": b"well"} if rank in (0, 3) else {} for rank in range(5)
    ]
    others = results[2][2]
    assert results[1][2] == others + 2  # the lowest healthy rank sent it


def test_majority_needs_more_than_half_of_the_ranks():
    assert Divergence("w", {1: [0, 1], 2: [2], 3: [3]}).majority() is None
    assert Divergence("w", {1: [0], 2: [1, 2]}).majority() == [1, 2]


def test_installed_state_keeps_only_the_majoritys_keys(threads):
    """A rank may lack part of the state, or have extra state."""
    majority, local = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.zeros(3))
    packed = pack(
        {majority: "w"}, ["w"], {majority: {"step": torch.tensor(4.0), "sum": majority + 1}}
    )
    local_sum = torch.zeros(3)
    state: dict[torch.Tensor, dict[str, Any]] = {local: {"sum": local_sum, "more": 1}}
    install_parameters({local: "w"}, packed, state)
    assert torch.equal(local, majority)
    assert state[local].keys() == {"step", "sum"}
    assert state[local]["sum"] is local_sum  # in place
    assert torch.equal(local_sum, torch.full((3,), 2.0))
    assert state[local]["step"] == 4


def test_spread_majority_without_majority_raises_on_every_rank(threads):
    def program(transport: LocalTransport) -> str:
        with pytest.raises(MismatchError) as caught:
            spread_majority(transport, {"w": bytes([transport.rank])})
        return str(caught.value)

    (text,) = set(threads(3, program))
    assert "parameter 'w'" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"on_divergence": "heal", "check_every": 0},
            "on_divergence='heal' needs a check: give check_every",
        ),
        ({"on_divergence": "mend", "check_every": 5}, "one of error, warn, heal; got 'mend'"),
    ],
)
def test_invalid_on_divergence_raises(threads, options, message):
    def program(transport: LocalTransport) -> None:
        model = network()
        with world.entered(transport), pytest.raises(ValueError, match=message):
            DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)

    threads(1, program)

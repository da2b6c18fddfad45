"""LocalSGD with fragments: it exchanges parts of the model in turn."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import gtopk.torch as hvd
from collectives.transports import LocalTransport
from gtopk.local_sgd import LocalSGD, averaging, nesterov
from gtopk.local_sgd.fragments import assign_parameters
from gtopk.local_sgd.outer_exchange import OuterExchange
from tests.gtopk.local_rounds import (
    GTOPK,
    PARTS,
    WHOLE,
    backward,
    close,
    descent,
    in_fragments,
    momentum,
    network,
    on_ranks,
    train,
    weights,
)

SHARDS = hvd.Compression.shards(period=3, bits=3)


def parameters(sizes: dict[str, int]) -> dict[torch.nn.Parameter, str]:
    return {torch.nn.Parameter(torch.zeros(size)): name for name, size in sizes.items()}


def test_blocks_go_to_fragments_in_turn_and_other_layers_level_sizes() -> None:
    blocks = {
        f"blocks.{number}.{name}": size
        for number in range(6)
        for name, size in (("attention.weight", 40), ("attention.bias", 8), ("mlp.weight", 52))
    }
    names = parameters({"embedding.weight": 200, **blocks, "head.weight": 190, "head.bias": 10})
    assigned = assign_parameters(names, 5)
    by_name = [
        {n.rsplit(".", 1)[0] for n in map([*names.values()].__getitem__, p)} for p in assigned
    ]
    assert by_name == [
        {"embedding"},
        *(
            {f"blocks.{n}.{m}" for n in each for m in ("attention", "mlp")}
            for each in ((0, 3), (1, 4), (2, 5))
        ),
        {"head"},
    ]


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("fragments", [2, 3, 4])
def test_layers_are_divided_if_whole_layers_are_uneven(named: bool, fragments: int) -> None:
    sizes = [p.numel() for p in network().parameters()]
    keys = (
        ["0.weight", "0.bias", "2.weight", "2.bias"]
        if named
        else [f"noname.0.{n}" for n in range(4)]
    )
    assert (
        assign_parameters(parameters(dict(zip(keys, sizes, strict=True))), fragments)
        == PARTS[fragments]
    )


def test_no_fragment_is_empty() -> None:
    names = parameters({"0.weight": 1000, "1.weight": 1, "1.bias": 1, "2.weight": 0})
    assert assign_parameters(names, 3) == [[0], [1, 3], [2]]
    with pytest.raises(ValueError, match="number of parameters with values, 3, got 4"):
        assign_parameters(names, 4)


def simulate(
    ranks: int, steps: int, overlap: int, every: int, fragments: int, outer: Any
) -> list[torch.Tensor]:
    """Return all ranks' weights after each step, and after a last exchange, in one process."""
    center, models = network(), [network() for _ in range(ranks)]
    inner = [momentum(model.parameters()) for model in models]
    outside = outer(list(center.parameters()))
    z = list(center.parameters())
    parts = PARTS[fragments]
    sent: list[Any] = [None] * fragments  # (step, changes)
    taken = [0] * fragments

    def take(part: int, step: int) -> None:
        taken[part] = step
        sent[part] = (
            step,
            [[[*m.parameters()][n].detach().clone() for n in parts[part]] for m in models],
        )

    @torch.no_grad()
    def exchange(part: int) -> None:
        _, replicas = sent[part]
        sent[part] = None
        outside.zero_grad()
        for place, number in enumerate(parts[part]):
            xs = [replica[place] for replica in replicas]
            z[number].grad = torch.stack([z[number].detach() - x for x in xs]).mean(0)
        outside.step()
        for model, replica in zip(models, replicas, strict=True):
            for place, number in enumerate(parts[part]):
                [*model.parameters()][number].add_(z[number] - replica[place])

    seen = []
    for step in range(1, steps + 1):
        for rank, model in enumerate(models):
            backward(model, rank, step)
            inner[rank].step()
        for part in range(fragments):
            if sent[part] is not None and step - sent[part][0] >= overlap:
                exchange(part)
        for part in range(fragments):
            first = -(-every * (part + 1) // fragments)
            if step >= first and (step - first) % every == 0:
                take(part, step)
                if not overlap:
                    exchange(part)
        seen.append(torch.cat([weights(model) for model in models]))
    for part in range(fragments):
        if sent[part] is not None:
            exchange(part)
    for part in range(fragments):
        if taken[part] < steps:
            take(part, steps)
            exchange(part)
    return [*seen, torch.cat([weights(model) for model in models])]


@pytest.mark.parametrize("compression", [hvd.Compression.none, WHOLE], ids=repr)
@pytest.mark.parametrize(
    ("fragments", "overlap", "every", "outer"),
    [
        (2, 0, 4, averaging),
        (4, 0, 4, nesterov),
        (3, 1, 4, averaging),
        (2, 3, 4, nesterov),
        (4, 5, 5, averaging),
    ],
)
def test_each_fragment_is_exchanged_every_inner_steps(
    fragments: int, overlap: int, every: int, outer: Any, compression: Any
) -> None:
    for ranks, steps in ((1, 9), (2, 11), (3, 12), (5, 13)):

        def rank(transport: LocalTransport, steps: int = steps) -> list[torch.Tensor]:
            model = network()
            optimizer = LocalSGD(
                momentum(model.parameters()),
                every,
                outer,
                compression,
                overlap_steps=overlap,
                fragments=fragments,
            )
            seen = []
            for step in range(1, steps + 1):
                backward(model, transport.rank, step)
                own = [p.grad for p in model.parameters()]
                optimizer.step()
                assert all(p.grad is g for p, g in zip(model.parameters(), own, strict=True))
                seen.append(weights(model))
            optimizer.outer_step()
            return [*seen, weights(model)]

        models = on_ranks(ranks, rank)
        for *each, expected in zip(
            *models, simulate(ranks, steps, overlap, every, fragments, outer), strict=True
        ):
            close(torch.cat(each), expected)
        assert all(torch.equal(each[-1], models[0][-1]) for each in models)


def test_ranks_agree_on_centers_and_the_last_exchanged_fragment() -> None:
    """The centers always, a fragment right after its exchange, everything after outer_step."""

    def rank(transport: LocalTransport) -> list[tuple[Any, ...]]:
        model = network()
        optimizer = LocalSGD(momentum(model.parameters()), 4, compression=GTOPK, fragments=4)
        seen = []
        for step in range(9):
            backward(model, transport.rank, step)
            optimizer.step()
            state = optimizer.state_dict()["local_sgd"]
            centers = [each["center"] for each in [state, *state["other_fragments"]]]
            alike = [
                p.detach().clone()
                for p in model.parameters()
                if p not in set(optimizer.diverging_parameters)
            ]
            seen.append((centers, alike, weights(model)))
        optimizer.outer_step()
        assert not optimizer.diverging_parameters
        return [*seen, ([], list(model.parameters()), weights(model))]

    for at, (one, *others) in enumerate(zip(*on_ranks(3, rank), strict=True)):
        assert len(one[1]) == (4 if at == 9 else 1)
        for other in others:
            assert torch.utils._pytree.tree_all(
                lambda pair: pair, torch.utils._pytree.tree_map(torch.equal, one[0], other[0])
            )
            assert all(map(torch.equal, one[1], other[1]))
            assert torch.equal(one[2], other[2]) == (at == 9)


@pytest.mark.parametrize("fragments", [1, 2, 4])
def test_fragments_shorten_exchanges_and_keep_their_sum(fragments: int) -> None:
    def rank(transport: LocalTransport) -> list[Any]:
        model = network()
        optimizer = LocalSGD(momentum(model.parameters()), 4, fragments=fragments)
        reports: list[Any] = []
        for step in range(8):
            backward(model, transport.rank, step)
            optimizer.step()
            if optimizer.last_step is not None and optimizer.last_step not in reports:
                reports.append(optimizer.last_step)
        return reports

    sizes = [p.numel() for p in network().parameters()]
    for reports in on_ranks(2, rank):
        assert len(reports) == 2 * fragments
        for turn in (reports[:fragments], reports[fragments:]):
            assert (
                sum(each.selected for each in turn) == sum(sizes) == sum(r.elements for r in turn)
            )
            assert sum(each.local_steps for each in turn) == 4
            assert {each.model_elements for each in turn} == {sum(sizes)}
            most = max(sum(sizes[n] for n in part) for part in PARTS.get(fragments, [range(4)]))
            assert max(each.selected for each in turn) == most


@pytest.mark.parametrize(("fragments", "overlap"), [(1, 3), (3, 0), (3, 3)])
@pytest.mark.parametrize("compression", [GTOPK, SHARDS], ids=repr)
def test_change_of_the_ranks_is_conserved(compression: Any, fragments: int, overlap: int) -> None:
    def rank(transport: LocalTransport) -> tuple[torch.Tensor, ...]:
        model, start = network(), weights(network())
        optimizer = LocalSGD(
            descent(model.parameters()),
            4,
            averaging,
            compression,
            overlap_steps=overlap,
            fragments=fragments,
        )
        own = torch.zeros_like(start)
        for step in range(14):
            backward(model, transport.rank, step)
            own += 0.1 * torch.cat([p.grad.reshape(-1) for p in model.parameters()])
            optimizer.step()
        optimizer.outer_step()
        (part,) = optimizer.state_dict()["gtopk"]["held"].values()
        unsent = torch.cat(
            [
                sum(tensor.reshape(-1) for tensor in part[name].values())
                for name in optimizer._names.values()
            ]
        )
        return start, weights(model), own, unsent

    for ranks in (1, 2, 3):
        start, after, own, unsent = zip(*on_ranks(ranks, rank), strict=True)
        assert all(torch.equal(each, after[0]) for each in after)
        assert ranks == 1 or sum(unsent).any()
        close(start[0] - after[0] + sum(unsent), sum(own) / ranks)


@pytest.mark.parametrize("fragments", [1, 4])
def test_byte_budget_is_for_one_exchange_of_all_fragments(fragments: int) -> None:
    def rank(transport: LocalTransport) -> None:
        generator = torch.Generator().manual_seed(transport.rank)
        parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (40_000, 30_000, 20_000, 10_000)]
        optimizer = LocalSGD(
            descent(parameters),
            4,
            compression=hvd.Compression.auto(bytes_per_step=40_000),
            fragments=fragments,
        )
        sent = []
        for _ in range(16):
            for p in parameters:
                p.grad = torch.randn(p.shape, generator=generator)
            before = optimizer.last_step
            optimizer.step()
            if optimizer.last_step is not before:
                sent.append(optimizer.last_step.sent_bytes)
        # By then ranks have cached the names, have compared the models, and send neither.
        assert 20_000 < sum(sent[-fragments:]) <= 40_000

    on_ranks(2, rank)


@pytest.mark.parametrize("overlap", [0, 2])
def test_ranks_that_end_rounds_differently_raise_without_waiting(overlap: int) -> None:
    def rank(transport: LocalTransport) -> None:
        model, optimizer = in_fragments(overlap, fragments=4)

        def epoch() -> None:
            train(transport.rank, model, optimizer, range(5 - transport.rank))
            optimizer.outer_step()

        with pytest.raises(hvd.HorovodInternalError, match=r"the script called outer_step\(\)"):
            epoch()
        assert weights(model).isfinite().all()

    on_ranks(2, rank)


def test_unequal_fragments_or_residual_decay_raise() -> None:
    def rank(transport: LocalTransport) -> None:
        for options, message in (
            ({"fragments": 1 + transport.rank}, "rank 1: .*fragments=2"),
            ({"fragments": 2 + transport.rank}, "rank 1: .*fragments=3"),
            ({"residual_decay": [1.0, 0.5][transport.rank]}, r"rank 1: .*residual_decay=0\.5"),
        ):
            model = network()
            # The first name does not belong to the first fragment.
            names = zip("dcba", model.parameters(), strict=True)
            optimizer = LocalSGD(
                momentum(model.parameters()),
                4,
                compression=GTOPK,
                named_parameters=names,
                **options,
            )
            backward(model, 0, 0)
            with pytest.raises(hvd.HorovodInternalError, match=message):
                optimizer.step()

    on_ranks(2, rank)


@pytest.mark.parametrize("overlap", [0, 1])
def test_failed_exchange_loses_no_step(overlap: int) -> None:
    def rank(transport: LocalTransport) -> tuple[torch.Tensor, torch.Tensor]:
        model, start = network(), weights(network())
        optimizer = LocalSGD(
            descent(model.parameters()), 4, averaging, overlap_steps=overlap, fragments=4
        )
        (group,) = optimizer.outer.param_groups
        own, failed = torch.zeros_like(start), 0
        for step in range(9):
            group["lr"] = 1.0 + (transport.rank if step == 2 else 0)  # unequal once
            backward(model, transport.rank, step)
            own += 0.1 * torch.cat([p.grad.reshape(-1) for p in model.parameters()])
            with contextlib.suppress(hvd.HorovodInternalError):
                failed += 1
                optimizer.step()
                failed -= 1
        assert failed == 1
        optimizer.outer_step()
        return start - weights(model), own

    moved, own = zip(*on_ranks(2, rank), strict=True)
    assert torch.equal(*moved)
    close(moved[0], sum(own) / 2)


def test_exchanges_in_progress_after_a_failure_have_unique_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begin = OuterExchange.begin

    def rank(transport: LocalTransport) -> None:
        model, optimizer = in_fragments(4, fragments=4)
        names: dict[OuterExchange, str] = {}
        for each in optimizer._fragments:

            def note(name: str, *rest: Any, exchange: OuterExchange = each.exchange) -> None:
                assert name not in [names[e] for e in names if e._running is not None]
                names[exchange] = name
                begin(exchange, name, *rest)

            monkeypatch.setattr(each.exchange, "begin", note)
        (group,) = optimizer.outer.param_groups
        failed = 0
        for step in range(16):
            optimizer.inner_steps = 4 if step < 9 else 1
            group["lr"] = 0.7 + (transport.rank if step == 8 else 0)  # unequal once
            backward(model, transport.rank, step)
            try:
                optimizer.step()
            except hvd.HorovodInternalError:
                failed += 1
        assert failed == 1

    on_ranks(2, rank)


def test_outer_step_restarts_the_turns_of_the_fragments() -> None:
    def rank(transport: LocalTransport) -> None:
        model, optimizer = in_fragments(0, fragments=4)
        for _ in range(2):
            counts = []
            for step in range(6):
                before = optimizer.outer_steps
                train(transport.rank, model, optimizer, [step])
                counts.append(optimizer.outer_steps - before)
            assert counts == [1] * 6
            optimizer.outer_step()
            assert optimizer.steps_made == 0
            assert not optimizer.outer_step()

    on_ranks(2, rank)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fragments": 0}, r"fragments must lie in 1\.\.inner_steps=4, got 0"),
        ({"fragments": 5}, r"fragments must lie in 1\.\.inner_steps=4, got 5"),
        ({"fragments": 1.5}, "fragments must be an integer"),
        ({"fragments": 2, "inner_steps": None}, r"outer_step\(\) exchanges all at once"),
        ({"fragments": 6, "inner_steps": 8}, "number of parameters with values, 4, got 6"),
        ({"residual_decay": 1.5}, r"must lie in 0\.\.1, got 1\.5"),
        ({"residual_decay": float("nan")}, r"must lie in 0\.\.1, got nan"),
        ({"residual_decay": True}, "must be a number"),
        ({"residual_decay": 0.9, "compression": hvd.Compression.fp16}, "keeps a residual"),
    ],
)
def test_invalid_options_raise(options: dict[str, Any], message: str) -> None:
    def rank(transport: LocalTransport) -> None:
        all_options: dict[str, Any] = {"inner_steps": 4, "compression": GTOPK, **options}
        with pytest.raises((ValueError, TypeError), match=message):
            LocalSGD(descent(network().parameters()), **all_options)

    on_ranks(1, rank)

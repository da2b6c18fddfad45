"""For 4 ranks of fsdp_checks.py, two replicas of two shards: exchanges overlap with backward."""

from __future__ import annotations

import threading

import torch
from fsdp_hook import MESH, RANK, network, weights
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from gtopk import fsdp
from gtopk.integrations.fsdp_units import Unit

DECIDES = Unit.is_only_viewed


class Twice(torch.nn.Sequential):
    """Uses its first layer twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self[0](x).tanh())


def replicated(
    dtype: torch.dtype = torch.float32, **options: object
) -> tuple[torch.nn.Module, fsdp.ReplicaState]:
    model = Twice(*network()).to(dtype)
    for module in (*model, model):
        fully_shard(module, mesh=MESH["shard"], **options)
    return model, fsdp.replicate(model, MESH["replicate"], 0.1)


def loss(model: torch.nn.Module, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + RANK)
    x = torch.randn(8, 12, generator=generator).to(dtype)
    return model(x).tanh().square().mean()


def test_backward_continues_while_shards_are_exchanged() -> None:
    model, state = replicated()
    loss(model, 0).backward()  # the first step measures
    model.zero_grad()
    may_run, has_begun = threading.Event(), threading.Event()

    def work(transport: object, all_flags: object) -> None:
        has_begun.set()
        assert may_run.wait(60)

    held_up = state.process_set.engine.submit("held up", [], work)
    assert has_begun.wait(60)
    x = torch.randn(8, 12, requires_grad=True)
    x.register_hook(lambda gradient: may_run.set())  # the last thing that backward does
    before = len(state._unfinished)
    model(x).square().mean().backward()
    held_up.wait()
    assert (before, len(state._unfinished), state.progress.steps) == (0, 0, 2)


def train(model: torch.nn.Module, state: fsdp.ReplicaState) -> tuple[torch.Tensor, torch.Tensor]:
    """Take steps that accumulate, that are not finite on a rank, and that keep gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(7):
        if step != 3:
            optimizer.zero_grad()
        if step == 4:
            model.set_requires_all_reduce(False)
            loss(model, 50).backward()
            model.set_requires_all_reduce(True)
        factor = torch.nan if (step, RANK) == (5, 2) else 1.0
        (loss(model, step) * factor).backward()
        optimizer.step()
    (held,) = state.state_dict()["held"].values()
    return weights(model), torch.cat([each["residual"].reshape(-1) for each in held.values()])


def test_overlapped_and_waiting_backward_are_bit_identical() -> None:
    decided: list[bool] = []

    def decide(unit: Unit, gradients: torch.Tensor) -> bool:
        decided.append(DECIDES(unit, gradients))
        return decided[-1]

    trained = []
    try:
        for decides in (decide, lambda *call: False):
            Unit.is_only_viewed = decides
            trained.append(train(*replicated()))
    finally:
        Unit.is_only_viewed = DECIDES
    for overlapped, waited in zip(*trained, strict=True):
        assert torch.equal(overlapped, waited)
    assert sum(decided) > len(decided) / 2
    assert not all(decided)  # backward waits before it adds to a gradient


def test_backward_waits_when_fsdp_reads_gradients_at_once() -> None:
    decided: list[bool] = []
    Unit.is_only_viewed = lambda *call: bool(decided.append(DECIDES(*call))) or decided[-1]
    try:
        for dtype, options in (
            (torch.float64, {}),
            (torch.float32, {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)}),
            (torch.float32, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
        ):
            model, _ = replicated(dtype, **options)
            loss(model, 0, dtype).backward()
        model, _ = replicated()
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda parameter: None)
        loss(model, 0).backward()
    finally:
        Unit.is_only_viewed = DECIDES
    assert decided
    assert not any(decided)

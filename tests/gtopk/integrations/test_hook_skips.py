"""Passes that do not count, and the gradients that optimizers then drop."""

from __future__ import annotations

import torch

from gtopk.integrations.optimizer_checks import HookSkips


def gradients(optimizer: torch.optim.Optimizer) -> list[bool]:
    """Tell which parameters have gradients."""
    return [p.grad is not None for group in optimizer.param_groups for p in group["params"]]


def test_skipped_pass_drops_all_gradients_except_those_of_other_models() -> None:
    one, other, unowned = (torch.nn.Parameter(torch.zeros(2)) for _ in range(3))
    skips, others, same = HookSkips(lambda: [one], 20), HookSkips(lambda: [other], 20), [one]
    again = HookSkips(lambda: same, 20)  # another state of the first model, from an earlier run
    optimizer = torch.optim.SGD([one, other, unowned], lr=1.0)

    def dropped(counted: bool) -> list[bool]:
        for parameter in (one, other, unowned):
            parameter.grad = torch.ones(2)
        skips.note_pass(counted, 0, 1, "rank 0")
        skips.drop(optimizer)
        return gradients(optimizer)

    assert dropped(True) == [True, True, True]
    assert dropped(False) == [False, True, False]
    one.grad = torch.ones(2)  # not from a pass that the hook saw
    skips.drop(optimizer)
    assert gradients(optimizer) == [True, True, False]
    assert dropped(False) == [False, True, False]
    assert [each.count for each in (skips, others, again)] == [2, 0, 0]

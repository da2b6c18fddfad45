"""The audit finds exactly the elements that races lose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gtopk.runtime.world.membership import World
from tests.gtopk.adaptive.hogbatch_workers import adapted, flat, train
from tests.gtopk.adaptive.modelled_ranks import on_ranks


@pytest.mark.parametrize("size", [1, 3])
def test_audit_reports_overwritten_elements_as_share_of_all_steps(
    size: int,
) -> None:
    """In lock step, every worker loses one element of its first step, and nothing else."""

    def program(here: World) -> Any:
        loader, model, optimizer = adapted(lock_step=True, audit=True)
        update, steps, lost = loader._writer.update, [], []

        def update_and_lose(apply: Callable[[], None]) -> None:
            before = flat(model).clone()
            update(apply)
            steps.append(flat(model) - before)
            if not lost:
                element = model[0].weight.data[here.rank]
                lost.append(float(element[0] - before[here.rank * len(element)]))
                element[0] -= lost[0]

        loader._writer.update = update_and_lose
        train(loader, model, optimizer)
        return lost[0], float(torch.stack(steps).abs().sum()), loader.audited()

    lost, taken, audited = zip(*on_ranks(size, program), strict=True)
    share = sum(map(abs, lost)) / sum(taken)
    assert share > 1e-4
    assert audited == pytest.approx([share] * size, rel=1e-9, abs=0)

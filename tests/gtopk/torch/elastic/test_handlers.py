"""Residuals survive a change of the ranks: their sum is conserved."""

from __future__ import annotations

import pytest
import torch

import gtopk.torch as hvd
from gtopk.torch.elastic import TorchState
from tests.gtopk.torch.checkpoint.run import Run


class OptimizerWithResidual(torch.optim.SGD):
    """An optimizer with a residual, like a distributed one."""

    steps = 0
    buckets: list[list[str]]
    held: torch.Tensor | None = None

    def state_dict(self):
        held = {} if self.held is None else {"weight": {"residual": self.held}}
        own = {
            "ranks": hvd.size(),
            "steps": self.steps,
            "buckets": self.buckets,
            "held": {hvd.rank(): held},
        }
        return {**super().state_dict(), "gtopk": own}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        if own := state_dict.get("gtopk"):
            assert own["ranks"] == hvd.size()
            self.steps, self.buckets = own["steps"], own["buckets"]
            self.held = own["held"][hvd.rank()].get("weight", {}).get("residual")


def make():
    model = torch.nn.Linear(2, 1)
    optimizer = OptimizerWithResidual(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.buckets = []
    return TorchState(model, optimizer)


@pytest.mark.parametrize(("before", "after"), [(3, 3), (5, 2), (2, 3), (3, 1)])
def test_sum_of_residuals_is_conserved_on_another_number_of_ranks(
    ranks, tmp_path, monkeypatch, before, after
):
    monkeypatch.setenv("GTOPK_ELASTIC_DIR", str(tmp_path))

    def begin(rank):
        state = make()
        state.optimizer.param_groups[0]["lr"] = 0.5
        state.optimizer.steps, state.optimizer.buckets = 7, [["weight"], ["bias"]]
        state.optimizer.held = torch.tensor([1.0, 10.0**rank])
        state.commit()

    def go_on(rank):
        state = make()
        state.sync()
        state.restore()
        optimizer = state.optimizer
        assert optimizer.param_groups[0]["lr"] == 0.5
        # Also ranks without a residual must be at the others' step.
        assert (optimizer.steps, optimizer.buckets) == (7, [["weight"], ["bias"]])
        return optimizer.held

    ranks(before, begin)
    held = ranks(after, go_on)
    total = sum(tensor for tensor in held if tensor is not None)
    assert total.tolist() == [before, sum(10.0**rank for rank in range(before))]
    if before == after:
        assert [tensor.tolist() for tensor in held] == [[1.0, 10.0**r] for r in range(before)]


def test_sync_leaves_each_rank_its_own_residual(ranks):
    def program(rank):
        state = make()
        state.optimizer.held = torch.tensor([float(rank)])
        state.sync()
        state.commit()
        state.optimizer.held = None
        state.restore()
        return state.optimizer.held.item()

    assert ranks(3, program) == [0.0, 1.0, 2.0]


def test_plain_optimizer_resumes_from_the_commit(ranks, tmp_path, monkeypatch):
    monkeypatch.setenv("GTOPK_ELASTIC_DIR", str(tmp_path))

    def program(rank):
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + rank))
        state = TorchState(model, optimizer)
        state.sync()
        optimizer.param_groups[0]["lr"] *= 2
        state.commit()
        return optimizer.param_groups[0]["lr"]

    assert ranks(2, program) == [0.2, 0.2]
    assert ranks(3, program) == [0.4, 0.4, 0.4]


def test_restore_to_before_the_first_step_clears_the_residual(ranks):
    def program(rank):
        model = torch.nn.Linear(4, 3)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model.named_parameters(),
            hvd.Compression.gtopk(0.3, warmup_steps=4),
        )
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        state = TorchState(model, optimizer)

        def steps():
            generator, taken = torch.Generator().manual_seed(rank), []
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.randn(5, 4, generator=generator)).square().sum().backward()
                optimizer.step()
                taken.append(optimizer.last_step.selected)
            return [p.detach().clone() for p in model.parameters()], taken

        first = steps()
        state.restore()
        again = steps()
        assert all(map(torch.equal, first[0], again[0]))
        assert first[1] == again[1]

    ranks(2, program)


@pytest.mark.parametrize("mode", [{"mode": "abs", "micro_batch": 4}, {"mode": "adaptive-sgd"}])
def test_loader_with_rank_specific_state_is_refused(ranks, mode):
    """A `sync` would give all ranks rank 0's residual."""

    def program(rank):
        run = Run(momentum=0.0, **mode)
        with pytest.raises(ValueError, match="only those of mode 'balanced' can be in an elastic"):
            TorchState(run.model, run.optimizer, loader=run.loader)

    ranks(2, program)

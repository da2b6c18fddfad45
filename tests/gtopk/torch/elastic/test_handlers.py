"""What each rank holds back survives a change of the ranks: its sum is conserved."""

from __future__ import annotations

import pytest
import torch

from gtopk.torch.elastic import TorchState


class HoldsBack(torch.optim.SGD):
    """An optimizer whose state_dict has something of each rank's own."""

    held: dict

    def state_dict(self):
        return {**super().state_dict(), "held": self.held}

    def load_state_dict(self, state_dict):
        state_dict = dict(state_dict)
        self.held = state_dict.pop("held", self.held)
        super().load_state_dict(state_dict)


def make(held):
    model = torch.nn.Linear(2, 1)
    optimizer = HoldsBack(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.held = held
    return TorchState(model, optimizer)


@pytest.mark.parametrize(("before", "after"), [(3, 3), (5, 2), (2, 3), (3, 1)])
def test_what_is_held_back_is_conserved(ranks, tmp_path, monkeypatch, before, after):
    monkeypatch.setenv("GTOPK_ELASTIC_DIR", str(tmp_path))

    def begin(rank):
        state = make(
            {"weight": {"residual": torch.tensor([1.0, 10.0**rank])}, "plan": [["weight"]]}
        )
        state.optimizer.param_groups[0]["lr"] = 0.5
        state.commit()

    def go_on(rank):
        state = make({})
        state.sync()
        state.restore()
        assert state.optimizer.param_groups[0]["lr"] == 0.5
        return state.optimizer.held

    ranks(before, begin)
    held = ranks(after, go_on)
    total = sum(each["weight"]["residual"] for each in held if each)
    assert total.tolist() == [before, sum(10.0**rank for rank in range(before))]
    assert all(each["plan"] == [["weight"]] for each in held if each)
    if before == after:
        assert [each["weight"]["residual"].tolist() for each in held] == [
            [1.0, 10.0**rank] for rank in range(before)
        ]


def test_a_sync_leaves_each_rank_what_it_holds_back(ranks):
    def program(rank):
        state = make({"value": rank})
        state.sync()
        state.commit()
        state.optimizer.held = {"value": "lost"}
        state.restore()
        return state.optimizer.held["value"]

    assert ranks(3, program) == [0, 1, 2]

"""A language model's state is carried from window to window, and through checkpoints."""

from __future__ import annotations

import pytest
import torch

from models.data.synthetic_text import synthesise_text
from models.lstm_ptb import LstmLanguageModel
from mpi_scripts.training.read_on import ReadOn
from mpi_scripts.training.task import Feed, moved


def test_loaded_lstm_state_moves_to_the_device_of_the_batches() -> None:
    """Checkpoints hold CPU tensors; the device "meta" stands in for a GPU."""
    elsewhere = torch.device("meta")
    text = synthesise_text(600, 0)
    saved = ReadOn(text, Feed(0, 1, 2))
    model = LstmLanguageModel(saved.sizes.outputs, width=4, dropout=0.0)
    first, second, *_ = saved.batches(0, 0)
    saved.loss(model, first)
    resumed = ReadOn(text, Feed(0, 1, 2))
    resumed.load_state_dict(saved.state_dict())
    assert resumed.loss(model.to(elsewhere), moved(second, elsewhere)).device == elsewhere
    assert {state.device for state in resumed.state_dict().values()} == {elsewhere}


@pytest.mark.parametrize(("batch_size", "remembers"), [(2, True), (4, False)])
def test_lstm_state_is_dropped_when_the_batch_size_changes(
    batch_size: int, remembers: bool
) -> None:
    text = synthesise_text(600, 0)
    saved = ReadOn(text, Feed(0, 1, 2))
    model = LstmLanguageModel(saved.sizes.outputs, width=4, dropout=0.0)
    saved.loss(model, next(saved.batches(0, 0)))
    resumed = ReadOn(text, Feed(0, 1, batch_size))
    resumed.load_state_dict(saved.state_dict())
    assert bool(resumed.state_dict()) == remembers
    assert resumed.loss(model, next(resumed.batches(0, 1))).isfinite()

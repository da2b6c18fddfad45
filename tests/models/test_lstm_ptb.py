"""The LSTM language model: the published size, and a state carried across windows."""

from __future__ import annotations

import torch

from models.lstm_ptb import LstmLanguageModel


def test_lstm_ptb_has_the_published_number_of_parameters() -> None:
    with torch.device("meta"):
        model = LstmLanguageModel()
    assert sum(p.numel() for p in model.parameters()) == 66_034_000


def test_lstm_windows_with_carried_state_equal_one_long_window() -> None:
    torch.manual_seed(0)
    model = LstmLanguageModel(vocabulary=11, width=8).eval()
    tokens = torch.randint(11, (3, 10))
    whole, _ = model(tokens)
    first, state = model(tokens[:, :4])
    second, _ = model(tokens[:, 4:], state.detach())
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole)
    assert whole.shape == (3, 10, 11)


def test_detached_lstm_state_carries_no_gradient() -> None:
    model = LstmLanguageModel(vocabulary=5, width=4)
    _, state = model(torch.zeros(2, 3, dtype=torch.int64))
    assert state.hidden.requires_grad
    assert not any(part.requires_grad for part in state.detach())

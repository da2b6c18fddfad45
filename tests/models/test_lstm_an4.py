"""The speech network: the published size, and padding without influence."""

from __future__ import annotations

import torch

from models.lstm_an4 import LOOK_AHEAD, LstmAn4


def test_lstm_an4_has_the_published_number_of_parameters() -> None:
    with torch.device("meta"):
        model = LstmAn4()
    assert sum(p.numel() for p in model.parameters()) == 27_569_568


def small() -> LstmAn4:
    torch.manual_seed(0)
    return LstmAn4(width=6, layers=2, bands=21, letters=5).eval()


def test_padding_does_not_change_the_scores_of_an_utterance() -> None:
    model = small()
    spectrograms = torch.randn(2, 21, 31)
    lengths = torch.tensor([31, 20])
    scores, steps = model(spectrograms, lengths)
    assert scores.shape == (2, 16, 5)
    assert steps.tolist() == [16, 10]
    noisy = spectrograms.clone()
    noisy[1, :, 20:] = 0
    alone, _ = model(noisy[1:, :, :20], lengths[1:])
    padded, _ = model(noisy, lengths)
    torch.testing.assert_close(padded[1, :10], alone[0], atol=1e-5, rtol=1e-4)


def test_scores_depend_on_no_frame_beyond_the_look_ahead() -> None:
    model = small()
    frames = 2 * (LOOK_AHEAD + 30)
    spectrograms = torch.randn(1, 21, frames)
    changed = spectrograms.clone()
    changed[:, :, -1] += 3
    lengths = torch.tensor([frames])
    moved = (model(spectrograms, lengths)[0] != model(changed, lengths)[0]).any(2)[0]
    seen_by_convolutions = 8  # steps: five frames to each side in one, five steps in the other
    first = int(moved.nonzero()[0])
    last = frames // 2 - 1
    assert last - LOOK_AHEAD - seen_by_convolutions <= first < last

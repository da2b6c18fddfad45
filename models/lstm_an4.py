"""The speech network of the AN4 experiments: convolutions, five LSTMs, a lookahead convolution.

    spectrogram [161, frames] --2 conv--> [32 * 41, frames / 2] --5 LSTM--> [800] --look ahead 20-->
        --linear--> scores of 29 letters for every second frame

Deep Speech 2 (Amodei et al. 2016) in the form that gTop-k's authors train: with unidirectional
LSTMs, and a convolution over the next 20 steps instead of the backward ones.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import torch
import torch.nn.functional as F

from .data.speech import BANDS, LETTERS

LOOK_AHEAD: Final = 20  # steps of two frames
_CEILING: Final = 20.0  # activations are clipped to 0.._CEILING


class LstmAn4(torch.nn.Module):
    """float32 [n, bands, frames] and lengths int64 [n], descending -> scores and their lengths.

    scores: [n, steps, letters], a step being two frames. 27,569,568 parameters at the defaults.
    """

    def __init__(
        self,
        width: int = 800,
        layers: int = 5,
        bands: int = BANDS,
        letters: int = len(LETTERS),
        channels: int = 32,
    ) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(1, channels, (41, 11), stride=(2, 2), padding=(20, 5))
        self.first_norm = torch.nn.BatchNorm2d(channels)
        self.second = torch.nn.Conv2d(channels, channels, (21, 11), stride=(2, 1), padding=(10, 5))
        self.second_norm = torch.nn.BatchNorm2d(channels)
        quarter = (bands + 3) // 4
        sizes = [channels * quarter, *[width] * layers]
        self.lstms = torch.nn.ModuleList(torch.nn.LSTM(*pair) for pair in pairwise(sizes))
        # Between layers; the first layer's input is normalised by the convolutions.
        self.norms = torch.nn.ModuleList(torch.nn.BatchNorm1d(width) for _ in range(layers - 1))
        self.ahead = torch.nn.Conv1d(width, width, LOOK_AHEAD + 1, groups=width, bias=False)
        self.last_norm = torch.nn.BatchNorm1d(width)
        self.letters = torch.nn.Linear(width, letters, bias=False)

    def forward(
        self, spectrograms: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        steps = (lengths + 1) // 2
        x = spectrograms.unsqueeze(1)
        x = _until(self.first(x), steps)
        x = _until(F.hardtanh(self.first_norm(x), 0, _CEILING), steps)
        x = _until(self.second(x), steps)
        x = _until(F.hardtanh(self.second_norm(x), 0, _CEILING), steps)
        x = x.flatten(1, 2).permute(2, 0, 1)  # [steps, n, channels * quarter of the bands]
        for number, lstm in enumerate(self.lstms):
            if number:
                x = _each_step(self.norms[number - 1], x)
            packed = torch.nn.utils.rnn.pack_padded_sequence(x, steps.cpu())
            x, _ = torch.nn.utils.rnn.pad_packed_sequence(lstm(packed)[0])
        x = F.pad(x.permute(1, 2, 0), (0, LOOK_AHEAD))  # [n, width, steps]
        x = F.hardtanh(self.ahead(x), 0, _CEILING).permute(2, 0, 1)
        x = self.letters(_each_step(self.last_norm, x))
        return x.transpose(0, 1), steps


def _until(x: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """Return [n, channels, bands, steps] with each sample's padding set to zero."""
    return x * (torch.arange(x.shape[3], device=x.device) < steps.to(x.device)[:, None, None, None])


def _each_step(norm: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return [steps, n, width] normalised over all steps of all samples."""
    normed: torch.Tensor = norm(x.flatten(0, 1)).view_as(x)
    return normed

"""The two-layer LSTM language model (Zaremba et al. 2014), with its state carried across windows.

tokens --embed--> [width] --LSTM--> --LSTM--> [width] --linear--> scores over the vocabulary
                             |         |
                           state     state    passed to the next window, detached
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class LstmState(NamedTuple):
    """The state of the layers: each float32 [layers, lanes, width]."""

    hidden: torch.Tensor
    cell: torch.Tensor

    def detach(self) -> LstmState:
        """Return the state for the next window: truncates backpropagation at its beginning."""
        return LstmState(self.hidden.detach(), self.cell.detach())


class LstmLanguageModel(torch.nn.Module):
    """int64 [lanes, steps] -> scores [lanes, steps, vocabulary], and the state after them.

    The defaults are the published large model: 66,034,000 parameters.
    """

    def __init__(
        self, vocabulary: int = 10_000, width: int = 1500, layers: int = 2, dropout: float = 0.65
    ) -> None:
        super().__init__()
        self.dropout = torch.nn.Dropout(dropout)
        self.embedding = torch.nn.Embedding(vocabulary, width)
        self.lstm = torch.nn.LSTM(width, width, layers, dropout=dropout, batch_first=True)
        self.decoder = torch.nn.Linear(width, vocabulary)
        for weight in (self.embedding.weight, self.decoder.weight):
            torch.nn.init.uniform_(weight, -0.1, 0.1)
        torch.nn.init.zeros_(self.decoder.bias)

    def forward(
        self, tokens: torch.Tensor, state: LstmState | None = None
    ) -> tuple[torch.Tensor, LstmState]:
        x = self.dropout(self.embedding(tokens))
        x, (hidden, cell) = self.lstm(x, state)
        return self.decoder(self.dropout(x)), LstmState(hidden, cell)

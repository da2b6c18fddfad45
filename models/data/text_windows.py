"""Text cut into windows that may be visited in any order, for transformers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .lanes import Window


class TextWindows:
    """tokens: int64 [n]; window w holds tokens w * steps and the next `steps` - 1."""

    def __init__(self, tokens: torch.Tensor, steps: int) -> None:
        self.tokens, self.steps = tokens, steps

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.steps

    def __getitem__(self, visit: int) -> Window:
        return self.__getitems__([visit])

    def __getitems__(self, visits: Sequence[int]) -> Window:
        begins = torch.from_numpy(np.asarray(visits) % len(self) * self.steps)
        places = begins[:, None] + torch.arange(self.steps)
        return Window(self.tokens[places], self.tokens[places + 1])

"""A transformer is tested on windows of a text, which must have at least one."""

from __future__ import annotations

import pytest
import torch

from models.data.lanes import Text
from mpi_scripts.training.read_on import ContinueText
from mpi_scripts.training.task import Feed


def test_test_text_shorter_than_a_window_is_refused_before_training() -> None:
    def task(tested: int) -> ContinueText:
        text = Text(torch.zeros(100, dtype=torch.int64), torch.zeros(tested), 256, "zeros")
        return ContinueText(text, Feed(0, 1, 2), context=8)

    assert task(9).sizes.outputs == 256
    with pytest.raises(ValueError, match="must have more bytes than a window of 8, got 8"):
        task(8)

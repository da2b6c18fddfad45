"""Windows of text: each token is read once in an epoch, and targets are shifted by one."""

from __future__ import annotations

import torch

from models.data.text_windows import TextWindows


def test_text_windows_cover_the_text_and_repeat_each_epoch() -> None:
    windows = TextWindows(torch.arange(11), 3)
    assert len(windows) == 3
    found = windows.__getitems__([2, 0, 4])
    assert found.inputs.tolist() == [[6, 7, 8], [0, 1, 2], [3, 4, 5]]
    assert torch.equal(found.targets, found.inputs + 1)

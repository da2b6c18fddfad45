"""Text in lanes: as in the picture, and every token is read once, by one rank."""

from __future__ import annotations

import pytest
import torch

from models.data.lanes import cut


def test_three_lanes_give_the_documented_windows_of_two() -> None:
    words = "abcdefghijklm"
    lanes = cut(torch.arange(len(words)), 3)
    windows = [
        [["".join(words[i] for i in lane) for lane in part.tolist()] for part in window]
        for window in lanes.windows(2)
    ]
    assert windows == [
        [["ab", "ef", "ij"], ["bc", "fg", "jk"]],
        [["cd", "gh", "kl"], ["de", "hi", "lm"]],
    ]


def test_lanes_of_all_ranks_together_are_the_text() -> None:
    lanes, size = cut(torch.arange(101), 6), 3
    shares = [lanes.of_rank(rank, size) for rank in range(size)]
    assert torch.equal(torch.cat([share.inputs for share in shares]), lanes.inputs)
    assert torch.equal(torch.cat([share.targets for share in shares]), lanes.targets)
    assert lanes.inputs.flatten().tolist() == list(range(6 * (100 // 6)))


def test_lane_windows_can_start_at_any_window() -> None:
    lanes = cut(torch.arange(50), 2)
    every = list(lanes.windows(5))
    assert len(every) == 24 // 5
    for first in range(len(every) + 1):
        left = list(lanes.windows(5, first))
        assert [w.inputs.tolist() for w in left] == [w.inputs.tolist() for w in every[first:]]


def test_text_shorter_than_its_lanes_is_refused() -> None:
    with pytest.raises(ValueError, match="3 tokens must be more than the 3 lanes"):
        cut(torch.arange(3), 3)

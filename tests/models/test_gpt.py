"""The small GPT: GPT-2's size with GPT-2's settings, and causal attention."""

from __future__ import annotations

import pytest
import torch

from models.gpt import Gpt

GPT2 = {"vocabulary": 50_257, "context": 1024}


@pytest.mark.parametrize(
    ("sizes", "parameters"),
    [
        (
            {"vocabulary": 50257, "context": 1024, "width": 768, "layers": 12, "heads": 12},
            124439808,
        ),
        (
            {"vocabulary": 50257, "context": 1024, "width": 1024, "layers": 24, "heads": 16},
            354823168,
        ),
        ({}, 834_304),
    ],
    ids=["gpt2", "gpt2-medium", "small"],
)
def test_gpt_has_the_published_number_of_parameters(sizes, parameters: int) -> None:
    with torch.device("meta"):
        model = Gpt(**sizes)
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_later_tokens_do_not_change_earlier_scores() -> None:
    torch.manual_seed(0)
    model = Gpt(vocabulary=9, context=8, width=16, layers=2, heads=2).eval()
    tokens = torch.randint(9, (2, 8))
    other = tokens.clone()
    other[:, 5:] = (other[:, 5:] + 1) % 9
    scores, changed = model(tokens), model(other)
    torch.testing.assert_close(scores[:, :5], changed[:, :5])
    assert not torch.allclose(scores[:, 5:], changed[:, 5:])
    torch.testing.assert_close(model(tokens[:, :3]), scores[:, :3])


def test_untrained_gpt_has_nearly_equal_scores() -> None:
    torch.manual_seed(0)
    scores = Gpt()(torch.randint(256, (4, 64)))
    assert scores.shape == (4, 64, 256)
    assert scores.std() < 0.5


def test_width_that_heads_do_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="width must be a multiple of heads, got 10 and 4"):
        Gpt(width=10)

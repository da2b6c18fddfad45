"""Synthetic text of Penn Treebank's size, from a random first-order Markov chain of words.

A word is followed by one of eight others, with frequencies in proportion to 1, 1/2, ... 1/8; or,
one time in four, by any word, with Zipf's frequencies. A network that learns the table reaches a
perplexity far below that of the words' frequencies alone.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from .lanes import Text

VOCABULARY: Final = 10_000
TRAIN, TEST = 929_589, 73_760  # words, ends of lines among them, as in Penn Treebank
FOLLOWERS: Final = 8
_ANY_SHARE: Final = 0.25
_LANES: Final = 512  # parts of the text that are generated together


def synthesise_text(samples: int | None = None, seed: int = 0) -> Text:
    """Return a text; samples: words for training, and a tenth as many for testing."""
    train, test = (TRAIN, TEST) if samples is None else (samples, -(-samples // 10))
    return Text(
        _generate(train, seed, stream=1),
        _generate(test, seed, stream=2),
        VOCABULARY,
        "synthetic, like Penn Treebank",
    )


def _generate(words: int, seed: int, stream: int) -> torch.Tensor:
    table = np.random.default_rng([seed, 0])
    followers = _zipf(table.random((VOCABULARY, FOLLOWERS)), VOCABULARY)
    random = np.random.default_rng([seed, stream])
    steps = -(-words // _LANES)
    anything = _zipf(random.random((steps, _LANES)), VOCABULARY)
    which = _zipf(random.random((steps, _LANES)), FOLLOWERS)
    is_any = random.random((steps, _LANES)) < _ANY_SHARE
    text = anything
    for step in range(1, steps):
        text[step] = np.where(is_any[step], text[step], followers[text[step - 1], which[step]])
    return torch.from_numpy(text.T.reshape(-1)[:words].copy())


def _zipf(uniform: np.ndarray, count: int) -> np.ndarray:
    """Map uniform numbers to Zipf's: below `count`, the r-th with probability ~ 1 / r."""
    frequencies = np.cumsum(1 / np.arange(1, count + 1))
    numbers: np.ndarray = np.searchsorted(frequencies, uniform * frequencies[-1])
    return numbers.clip(0, count - 1)

"""Synthetic speech of AN4's shape: letters are tones under noise, utterances random letters."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from .speech import LETTERS, RATE, SpeechData, Utterance, spectrogram

TRAIN, TEST = 948, 130  # recordings, as in AN4
FEWEST, MOST = 3, 40  # letters in an utterance
LETTER_SAMPLES: Final = RATE * 80 // 1000
SOUNDING_SAMPLES: Final = LETTER_SAMPLES * 3 // 4  # the rest is silence between two letters
_LOWEST_HZ, _STEP_HZ = 300, 200
_NOISE: Final = 0.05


class SyntheticSpeech:
    """count: number of utterances, of increasing length; first: the first one's number."""

    def __init__(self, count: int, *, first: int = 0, seed: int = 0) -> None:
        self.count, self.first, self.seed = count, first, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Utterance:
        random = np.random.default_rng([self.seed, self.first + number])
        letters = random.integers(1, len(LETTERS), FEWEST + number * (MOST - FEWEST) // self.count)
        tone_hz = np.repeat(_LOWEST_HZ + _STEP_HZ * letters, LETTER_SAMPLES)
        samples = 0.3 * np.sin(2 * np.pi * np.cumsum(tone_hz) / RATE)
        samples[np.arange(len(samples)) % LETTER_SAMPLES >= SOUNDING_SAMPLES] = 0
        samples += _NOISE * random.standard_normal(len(samples))
        sound = torch.from_numpy(samples.astype(np.float32))
        return Utterance(spectrogram(sound), torch.from_numpy(letters))


def synthesise_speech(samples: int | None = None, seed: int = 0) -> SpeechData:
    """Return both parts; samples: utterances for training, and a fifth as many for testing."""
    train, test = (TRAIN, TEST) if samples is None else (samples, -(-samples // 5))
    return SpeechData(
        SyntheticSpeech(train, seed=seed),
        SyntheticSpeech(test, first=train, seed=seed),
        "synthetic, like AN4",
    )

"""Speech for networks: letters, spectrograms, and batches of utterances of similar length.

samples --windows of 20 ms, every 10 ms--> --Fourier, Hamming--> magnitudes --log(1 + x)-->
    --mean 0, deviation 1--> float32 [161 bands, frames]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

import torch

RATE: Final = 16_000  # samples a second
WINDOW: Final = RATE * 20 // 1000
STRIDE: Final = RATE * 10 // 1000
BANDS: Final = WINDOW // 2 + 1
BLANK: Final = "_"  # stands between two equal letters, and where nothing is spoken
LETTERS: Final = BLANK + "'ABCDEFGHIJKLMNOPQRSTUVWXYZ "
NUMBERS: Final = {letter: number for number, letter in enumerate(LETTERS)}


class Utterance(NamedTuple):
    """spectrogram: float32 [bands, frames]; letters: int64 [n], numbers of LETTERS."""

    spectrogram: torch.Tensor
    letters: torch.Tensor


class SpeechBatch(NamedTuple):
    """Utterances, the longest first, padded with zeros.

    spectrograms: float32 [n, bands, frames]; lengths: int64 [n], frames of each.
    letters: int64 [letters of all]; letter_counts: int64 [n].
    """

    spectrograms: torch.Tensor
    lengths: torch.Tensor
    letters: torch.Tensor
    letter_counts: torch.Tensor


class Utterances(Protocol):
    """A corpus, ordered so that neighbours have similar lengths."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Utterance: ...


class SpeechData(NamedTuple):
    """Training and test data. origin: names its source, to be shown with every figure."""

    train: Utterances
    test: Utterances
    origin: str


class Buckets:
    """Batches of neighbours in a corpus: each visit (`visits`) is to a whole bucket of them."""

    def __init__(self, utterances: Utterances, bucket_size: int) -> None:
        self.utterances, self.bucket_size = utterances, bucket_size

    def __len__(self) -> int:
        return -(-len(self.utterances) // self.bucket_size)

    def __getitem__(self, visit: int) -> SpeechBatch:
        begin = visit % len(self) * self.bucket_size
        end = min(begin + self.bucket_size, len(self.utterances))
        return collate([self.utterances[number] for number in range(begin, end)])

    def __getitems__(self, visits: Sequence[int]) -> SpeechBatch:
        (visit,) = visits
        return self[visit]


def spectrogram(samples: torch.Tensor) -> torch.Tensor:
    """Return float32 [bands, frames] of samples, float32 [n]: a frame for each started 10 ms.

    Fewer samples than half a window are padded to half a window.
    """
    short = WINDOW // 2 + 1 - len(samples)
    samples = torch.nn.functional.pad(samples, (0, max(0, short)))
    window = torch.hamming_window(WINDOW, periodic=False)
    spectrum = torch.stft(samples, WINDOW, STRIDE, window=window, return_complex=True)
    loudness = spectrum.abs().log1p()
    return (loudness - loudness.mean()) / loudness.std().clamp_min(1e-8)


def collate(utterances: Sequence[Utterance]) -> SpeechBatch:
    """Return utterances as a batch."""
    ordered = sorted(utterances, key=lambda each: each.spectrogram.shape[1], reverse=True)
    lengths = torch.tensor([each.spectrogram.shape[1] for each in ordered])
    spectrograms = torch.zeros(len(ordered), BANDS, int(lengths[0]))
    for row, each in zip(spectrograms, ordered, strict=True):
        row[:, : each.spectrogram.shape[1]] = each.spectrogram
    return SpeechBatch(
        spectrograms,
        lengths,
        torch.cat([each.letters for each in ordered]),
        torch.tensor([len(each.letters) for each in ordered]),
    )


def numbered(text: str) -> torch.Tensor:
    """Return the numbers of a text's letters; raise ValueError for one that is not in LETTERS."""
    for place, letter in enumerate(text):
        if letter not in NUMBERS or letter == BLANK:
            raise ValueError(
                f"letter {letter!r} at place {place} is none of {LETTERS[1:]!r}: transcripts "
                "are in capitals, without marks"
            )
    return torch.tensor([NUMBERS[letter] for letter in text])


def spoken(numbers: torch.Tensor) -> str:
    """Return the text of CTC's letters: drop repeated ones, then blanks."""
    kept = torch.unique_consecutive(numbers).tolist()
    return "".join(LETTERS[number] for number in kept if number != NUMBERS[BLANK])

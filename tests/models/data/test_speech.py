"""Speech: spectrograms show their tones, buckets have neighbours, letters make up transcripts."""

from __future__ import annotations

import math

import pytest
import torch

from models.data.speech import (
    BANDS,
    LETTERS,
    RATE,
    Buckets,
    Utterance,
    collate,
    numbered,
    spectrogram,
    spoken,
)
from models.data.synthetic_speech import synthesise_speech


def test_spectrogram_of_a_tone_peaks_in_its_band() -> None:
    hertz = 2000
    seconds = torch.arange(RATE) / RATE
    found = spectrogram(torch.sin(2 * math.pi * hertz * seconds))
    assert found.shape == (BANDS, 101) == (161, 101)
    assert (found[:, 5:-5].argmax(0) == hertz * (BANDS - 1) * 2 // RATE).all()
    assert abs(float(found.mean())) < 1e-4
    assert abs(float(found.std()) - 1) < 1e-4


def test_spectrogram_accepts_silence_and_a_single_sample() -> None:
    for samples in (torch.zeros(1), torch.zeros(RATE)):
        assert torch.equal(spectrogram(samples), torch.zeros(BANDS, len(samples) // 160 + 1)) or (
            len(samples) == 1 and spectrogram(samples).shape == (BANDS, 2)
        )


def test_collate_pads_with_zeros_and_sorts_longest_first() -> None:
    made = [Utterance(torch.ones(BANDS, frames), torch.arange(frames)) for frames in (2, 5, 3)]
    batch = collate(made)
    assert batch.lengths.tolist() == batch.letter_counts.tolist() == [5, 3, 2]
    assert batch.spectrograms.shape == (3, BANDS, 5)
    assert batch.spectrograms.sum((1, 2)).tolist() == [5 * BANDS, 3 * BANDS, 2 * BANDS]
    assert batch.letters.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0, 1]


def test_speech_buckets_hold_neighbours_and_repeat_each_epoch() -> None:
    data = synthesise_speech(7).train
    buckets = Buckets(data, 3)
    assert len(buckets) == 3
    letters = [int(buckets[number].letter_counts.sum()) for number in range(3)]
    assert letters[1] == sum(len(data[number].letters) for number in (3, 4, 5))
    assert letters[2] == len(data[6].letters)
    assert torch.equal(buckets.__getitems__([4]).spectrograms, buckets[1].spectrograms)


def test_transcript_letters_are_numbered_and_decoded_by_ctc() -> None:
    assert len(LETTERS) == 29
    text = "HELLO IT'S"
    numbers = numbered(text)
    blank = torch.zeros(len(numbers), dtype=torch.int64)
    steps = torch.stack([numbers, numbers, blank], dim=1).flatten()
    assert spoken(steps) == text
    assert spoken(numbers) == "HELO IT'S", "an equal one that follows is the same letter"
    with pytest.raises(ValueError, match="letter 'é' at place 1 is none of"):
        numbered("Hé")

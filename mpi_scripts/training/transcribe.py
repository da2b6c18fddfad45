"""Speech to letters by connectionist temporal classification; measured by words and letters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from models.data.an4 import read_an4
from models.data.speech import (
    BANDS,
    BLANK,
    LETTERS,
    NUMBERS,
    Buckets,
    SpeechBatch,
    SpeechData,
    spoken,
)
from models.data.synthetic_speech import synthesise_speech

from .task import Feed, Loading, Sizes, Source, Task, moved, share


def edit_distance(text: Sequence[object], reference: Sequence[object]) -> int:
    """Return the fewest insertions, deletions and replacements between two (Levenshtein 1966)."""
    distances = list(range(len(reference) + 1))
    for row, one in enumerate(text, start=1):
        diagonal, distances[0] = distances[0], row
        for column, other in enumerate(reference, start=1):
            cheapest = min(distances[column], distances[column - 1], diagonal - (one == other))
            diagonal, distances[column] = distances[column], cheapest + 1
    return distances[-1]


class Transcribe(Task[SpeechBatch]):
    """Each batch is a bucket of utterances of similar length; buckets come in any order."""

    def __init__(self, data: SpeechData, feed: Feed) -> None:
        self.feed, self.origin = feed, data.origin
        self._test = Buckets(data.test, feed.batch_size)
        buckets = Buckets(data.train, feed.batch_size)
        self._loading: Loading[SpeechBatch] = Loading(buckets, feed, batch_size=1)
        self.batches_per_epoch = len(self._loading)
        self.sizes = Sizes(BANDS, len(LETTERS))

    def batches(self, epoch: int, first: int) -> Iterator[SpeechBatch]:
        return self._loading.batches(epoch, first)

    def loss(self, model: torch.nn.Module, batch: SpeechBatch) -> torch.Tensor:
        """Return the mean over utterances of -log of the likelihood of their letters."""
        scores, steps = model(batch.spectrograms, batch.lengths)
        likely = scores.float().log_softmax(2).transpose(0, 1)
        counts = batch.letter_counts
        # An utterance with more letters than steps is impossible, and its loss counts as 0.
        loss = F.ctc_loss(
            *(likely, batch.letters, steps, counts),
            blank=NUMBERS[BLANK],
            reduction="sum",
            zero_infinity=True,
        )
        return loss / len(counts)

    def count(self, model: torch.nn.Module, device: torch.device) -> list[float]:
        """Return the numbers of wrong words, words, wrong letters and letters."""
        totals = [0.0] * 4
        for number in share(len(self._test), self.feed):
            batch = moved(self._test[number], device)
            scores, steps = model(batch.spectrograms, batch.lengths)
            meant = batch.letters.cpu().split(batch.letter_counts.tolist())
            for row, end, letters in zip(
                scores.argmax(2).cpu(), steps.tolist(), meant, strict=True
            ):
                text, reference = spoken(row[:end]), "".join(LETTERS[n] for n in letters.tolist())
                totals[0] += edit_distance(text.split(), reference.split())
                totals[1] += len(reference.split())
                totals[2] += edit_distance(text, reference)
                totals[3] += len(reference)
        return totals

    def scores(self, totals: list[float]) -> dict[str, float]:
        word_errors, words, letter_errors, letters = totals
        return {"WER": word_errors / max(words, 1), "CER": letter_errors / letters}


def open_an4(source: Source, feed: Feed) -> Transcribe:
    """Return AN4, or synthetic speech in its place."""
    if source.folder is not None:
        return Transcribe(read_an4(source.folder), feed)
    return Transcribe(synthesise_speech(source.samples, source.seed), feed)

"""Tasks of language models.

ReadOn:        a recurrent model reads a text window by window; measured by perplexity
ContinueText:  a transformer predicts the next bytes in windows; measured in bits per byte
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

import torch
import torch.nn.functional as F

from models.data.docstrings import load_docstrings
from models.data.lanes import Lanes, Text, Window, cut
from models.data.ptb import read_ptb
from models.data.synthetic_text import synthesise_text
from models.data.text_windows import TextWindows
from models.lstm_ptb import LstmState

from .task import Feed, Loading, Sizes, Source, Task, moved, parts, share

CONTEXT = 64  # bytes
EVALUATED_AT_ONCE = 64  # windows


class ContinueText(Task[Window]):
    """Predict the next byte in windows of a text of bytes, visited in any order."""

    def __init__(self, text: Text, feed: Feed, context: int = CONTEXT) -> None:
        self.feed, self.origin = feed, text.origin
        self._test = TextWindows(text.test, context)
        if not len(self._test):
            raise ValueError(
                f"the test text must have more bytes than a window of {context}, got "
                f"{len(text.test)}"
            )
        self._loading: Loading[Window] = Loading(TextWindows(text.train, context), feed)
        self.batches_per_epoch = len(self._loading)
        self.sizes = Sizes(text.vocabulary, text.vocabulary)

    def batches(self, epoch: int, first: int) -> Iterator[Window]:
        return self._loading.batches(epoch, first)

    def loss(self, model: torch.nn.Module, batch: Window) -> torch.Tensor:
        return F.cross_entropy(model(batch.inputs).flatten(0, 1), batch.targets.flatten())

    def count(self, model: torch.nn.Module, device: torch.device) -> list[float]:
        """Return the loss of this rank's windows of the test text, and their bytes."""
        own, loss = share(len(self._test), self.feed), 0.0
        for numbers in parts(own, EVALUATED_AT_ONCE):
            window = moved(self._test.__getitems__(numbers), device)
            loss += float(self.loss(model, window)) * window.targets.numel()
        return [loss, len(own) * self._test.steps]

    def scores(self, totals: list[float]) -> dict[str, float]:
        loss, tokens = totals
        return {"bits per byte": loss / tokens / math.log(2)}


def open_docstrings(source: Source, feed: Feed) -> ContinueText:
    """Return the docstrings of the standard library, or of the modules in a folder."""
    return ContinueText(load_docstrings(source.folder), feed)


STEPS: Final = 35  # words in a window
TEST_LANES: Final = 32  # over all ranks: the measure does not depend on their number


class ReadOn(Task[Window]):
    """Read each of the batch's lanes, a part of the text, from start to end.

    The model's state carries over from window to window, and is empty at the start of an epoch.
    """

    def __init__(self, text: Text, feed: Feed, steps: int = STEPS) -> None:
        self.text, self.feed, self.steps, self.origin = text, feed, steps, text.origin
        self._lanes = cut(text.train, feed.batch_size * feed.size).of_rank(feed.rank, feed.size)
        self.batches_per_epoch = self._lanes.inputs.shape[1] // steps
        if not self.batches_per_epoch:
            raise ValueError(
                f"--batch-size {feed.batch_size} on {feed.size} ranks leaves "
                f"{self._lanes.inputs.shape[1]} words a lane, less than a window of {steps}"
            )
        self.sizes = Sizes(text.vocabulary, text.vocabulary)
        self._state: LstmState | None = None

    def batches(self, epoch: int, first: int) -> Iterator[Window]:
        if not first:
            self._state = None
        return self._lanes.windows(self.steps, first)

    def loss(self, model: torch.nn.Module, batch: Window) -> torch.Tensor:
        # A state loaded from a checkpoint is on the CPU.
        before = None if self._state is None else moved(self._state, batch.inputs.device)
        scores, state = model(batch.inputs, before)
        self._state = state.detach()
        return F.cross_entropy(scores.flatten(0, 1), batch.targets.flatten())

    def count(self, model: torch.nn.Module, device: torch.device) -> list[float]:
        """Return the loss of this rank's lanes of the test text, and their words."""
        lanes = cut(self.text.test, min(TEST_LANES, len(self.text.test) - 1))
        own = slice(self.feed.rank, None, self.feed.size)
        own_lanes = Lanes(lanes.inputs[own], lanes.targets[own])
        if not len(own_lanes.inputs):
            return [0.0, 0]
        loss, words = 0.0, 0
        state = None
        for window in own_lanes.windows(min(self.steps, own_lanes.inputs.shape[1])):
            window = moved(window, device)
            scores, state = model(window.inputs, state)
            targets = window.targets.flatten()
            loss += float(F.cross_entropy(scores.flatten(0, 1), targets, reduction="sum"))
            words += len(targets)
        return [loss, words]

    def scores(self, totals: list[float]) -> dict[str, float]:
        loss, words = totals
        return {"perplexity": math.exp(min(loss / words, 700.0))}  # e^710 is no float

    def state_dict(self) -> dict[str, Any]:
        return {} if self._state is None else self._state._asdict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = LstmState(**state) if state else None
        if self._state is not None and self._state.hidden.shape[1] != self.feed.batch_size:
            self._state = None  # with another batch size the lanes are other parts of the text


def open_ptb(source: Source, feed: Feed) -> ReadOn:
    """Return Penn Treebank, or synthetic text in its place."""
    if source.folder is not None:
        return ReadOn(read_ptb(source.folder), feed)
    return ReadOn(synthesise_text(source.samples, source.seed), feed)

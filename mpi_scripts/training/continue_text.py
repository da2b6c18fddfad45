"""A transformer says what comes next in windows of text; measured in bits per byte."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from models.data.docstrings import load_docstrings
from models.data.lanes import Text, Window
from models.data.text_windows import TextWindows

from .task import Feed, Loading, Sizes, Source, Task, moved, parts, share

CONTEXT = 64  # bytes
EVALUATED_AT_ONCE = 64  # windows


class ContinueText(Task[Window]):
    """Windows are visited in any order; text: of bytes."""

    def __init__(self, text: Text, feed: Feed, context: int = CONTEXT) -> None:
        self.feed, self.origin = feed, text.origin
        self._test = TextWindows(text.test, context)
        if not len(self._test):
            raise ValueError(
                f"the text held out for testing must have a window of {context} bytes and the one "
                f"after it, got {len(text.test)}"
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

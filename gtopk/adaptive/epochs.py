"""Epochs: where in which epoch the next batch lies."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


class Epochs:
    """Counts epochs, follows a DistributedSampler's set_epoch, and resumes in the middle of one.

    epoch, start: of the batch after the last one handed out.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        sampler = loader.sampler
        self._sampler = sampler if isinstance(sampler, DistributedSampler) else None
        self._followed = self._sampler.epoch if self._sampler else 0
        self.epoch = self._followed
        self.start = 0
        self._fresh = True  # the next iteration begins at epoch and start, as they are

    def begin(self) -> tuple[int, int]:
        """Return epoch and place where an iteration begins; one that was left half-way is over."""
        if not self._fresh and self.start:
            self.finish()
        if self._sampler is not None and self._sampler.epoch != self._followed:
            self._followed = self._sampler.epoch
            self.set(self._followed)
        self._fresh = False
        return self.epoch, self.start

    def set(self, epoch: int) -> None:
        """Let the next iteration be of this epoch."""
        if epoch != self.epoch:
            self.epoch, self.start = epoch, 0

    def finish(self) -> None:
        """Go on to the next epoch."""
        self.epoch, self.start = self.epoch + 1, 0
        self._fresh = True

    def state_dict(self) -> dict[str, Any]:
        """Return where the next batch lies."""
        return {"epoch": self.epoch, "start": self.start}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another loader stopped."""
        self.epoch, self.start = state["epoch"], state["start"]
        self._followed = self.epoch if self._sampler is None else self._sampler.epoch
        self._fresh = True

"""A timestamp is of the requested GPU, whichever GPU is current."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gtopk.exchange.buckets.arrays import Timestamp


class Event:
    """An event that records its stream."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.stream: Any = "of the current device"

    def record(self, stream: Any = "of the current device") -> None:
        self.stream = stream


def test_timestamp_records_on_its_own_gpus_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA cannot measure time between events of two GPUs: the current one, and a hook's."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"of {device}")
    event: Any = Timestamp(torch.device("cuda", 1))._event
    assert event.stream == "of cuda:1"

"""What an observer sees of an exchange.

Traffic     counts of messages, bytes and waits
profiled    named ranges around its parts, for torch.profiler and NVTX
"""

from __future__ import annotations

import sys
import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

from . import cost

_NO_RANGE: Final = nullcontext()


@dataclass
class Traffic:
    """Counts messages and bytes that this rank sent, and its waits, since `read_and_reset`.

    wait_seconds: for messages to arrive or leave, and inside the library's own allreduce.
    parent:       counts the same: a view's messages are also its parent's.
    Several threads may count at the same time.
    """

    sent_bytes: int = 0
    sent_messages: int = 0
    # Not compared: waits differ between runs, sent bytes do not.
    wait_seconds: float = field(default=0.0, compare=False)
    parent: Traffic | None = field(default=None, compare=False, repr=False)
    _lock: threading.Lock = field(
        default_factory=threading.Lock, init=False, compare=False, repr=False
    )

    def count(self, sent_bytes: int, sent_messages: int = 1) -> None:
        """Add sent bytes and messages."""
        with self._lock:
            self.sent_bytes += sent_bytes
            self.sent_messages += sent_messages
        # Outside the lock, so that no thread holds the locks of two counters.
        if self.parent is not None:
            self.parent.count(sent_bytes, sent_messages)

    def count_allreduce(self, length: int, value_bytes: int, ranks: int) -> None:
        """Add a library's own allreduce by formula (bandwidth-optimal), as it cannot be counted."""
        self.count(cost.dense_bytes(length, ranks, value_bytes), 2 * cost.rounds(ranks))

    def count_wait(self, seconds: float) -> None:
        """Add a wait, in seconds."""
        with self._lock:
            self.wait_seconds += seconds
        if self.parent is not None:
            self.parent.count_wait(seconds)

    def read_and_reset(self) -> Traffic:
        """Return the counters and reset them to zero; the parent's are kept."""
        with self._lock:
            taken = Traffic(self.sent_bytes, self.sent_messages, self.wait_seconds)
            self.sent_bytes = self.sent_messages = 0
            self.wait_seconds = 0.0
        return taken


def profiled(part: str) -> AbstractContextManager[None]:
    """Return a context that a running profiler shows as the range "gtopk::" + part.

    It does nothing without torch or a running profiler. The check is for the whole process, as
    another thread than the one that exchanges starts the profiler.
    """
    profiler = sys.modules.get("torch.autograd.profiler")
    if profiler is None or not profiler._is_profiler_enabled:
        return _NO_RANGE
    return _Range(profiler, f"gtopk::{part}")


class _Range:
    """A range of torch's profiler, and one of NVTX if the process uses a GPU."""

    def __init__(self, profiler: Any, name: str) -> None:
        self._name = name
        self._record = profiler.record_function(name)
        cuda: Any = sys.modules["torch.cuda"]
        # torch's emit_nvtx marks the ranges of the thread that enabled it only.
        self._nvtx = cuda.nvtx if cuda.is_initialized() else None

    def __enter__(self) -> None:
        self._record.__enter__()
        if self._nvtx is not None:
            self._nvtx.range_push(self._name)

    def __exit__(self, *error: Any) -> None:
        if self._nvtx is not None:
            self._nvtx.range_pop()
        self._record.__exit__(*error)

"""Named profiler ranges around the parts of an exchange, for torch.profiler and NVTX."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

_NO_RANGE: Final = nullcontext()


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

"""Ranges: the parts of an exchange by name, for torch.profiler and NVTX, while a profiler runs."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

_UNSEEN: Final = nullcontext()


def profiled(part: str) -> AbstractContextManager[None]:
    """Return a context that a running profiler shows as the range "gtopk::" + part.

    Without one, and without torch, it does nothing. The flag is of the process: the thread that
    exchanges is never the one that began to profile.
    """
    profiler = sys.modules.get("torch.autograd.profiler")
    if profiler is None or not profiler._is_profiler_enabled:
        return _UNSEEN
    return _Range(profiler, f"gtopk::{part}")


class _Range:
    """A range of torch's profiler; where the process works on a GPU, one of NVTX, too."""

    def __init__(self, profiler: Any, name: str) -> None:
        self._name = name
        self._seen = profiler.record_function(name)
        cuda: Any = sys.modules["torch.cuda"]
        # Under emit_nvtx torch writes the ranges of the thread that asked for it alone.
        self._nvtx = cuda.nvtx if cuda.is_initialized() else None

    def __enter__(self) -> None:
        self._seen.__enter__()
        if self._nvtx is not None:
            self._nvtx.range_push(self._name)

    def __exit__(self, *error: Any) -> None:
        if self._nvtx is not None:
            self._nvtx.range_pop()
        self._seen.__exit__(*error)

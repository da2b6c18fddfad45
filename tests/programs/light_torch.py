"""Import this before torch's optimizers: ranks that compile nothing need not load torch's compiler.

Each optimizer loads it to be left alone by it: 1.2 s of CPU time a rank, as much as torch itself.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import torch

_compiler: Any = types.ModuleType("torch._dynamo")


def disable(function: Callable[..., Any] | None = None, *how: Any, **more: Any) -> Any:
    """Return the function as it is: nothing is compiled."""
    return (lambda inner: inner) if function is None else function


_compiler.disable = disable
_compiler.graph_break = lambda *arguments: None
assert "torch._dynamo" not in sys.modules
sys.modules["torch._dynamo"] = torch._dynamo = _compiler

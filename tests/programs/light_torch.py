"""Import this before torch: ranks that compile nothing need not load what torch's compiler needs.

torch loads the shapes and decompositions of all its operators, 0.7 s of CPU time a rank of 2.6, and
each optimizer the compiler itself, to be left alone by it: another 1.2 s.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

assert "torch" not in sys.modules
sys.modules["torch._meta_registrations"] = types.ModuleType("torch._meta_registrations")

import torch  # noqa: E402 - it is to find that in its place
import torch._prims.rng_prims  # noqa: E402 - what a Generator needs of it

_compiler: Any = types.ModuleType("torch._dynamo")


def disable(function: Callable[..., Any] | None = None, *how: Any, **more: Any) -> Any:
    """Return the function as it is: nothing is compiled."""
    return (lambda inner: inner) if function is None else function


_compiler.disable = disable
_compiler.graph_break = lambda *arguments: None
assert "torch._dynamo" not in sys.modules
sys.modules["torch._dynamo"] = torch._dynamo = _compiler

"""Scaled gradients: what GradScaler leaves to an optimizer that unscales its gradients itself.

Of fused optimizers it unscales nothing: it hangs `grad_scale` and `found_inf` on them for the time
of `step`. A round adds up micro-batches of different scales, and steps later: both are taken down
meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

_HUNG: Final = ("grad_scale", "found_inf")


@contextmanager
def taken_down(optimizer: Any) -> Iterator[tuple[float, bool]]:
    """Return what the gradients were multiplied with, and whether they have overflowed."""
    hung = {name: vars(optimizer).pop(name) for name in _HUNG if name in vars(optimizer)}
    scale, overflow = (hung.get(name) for name in _HUNG)
    try:
        yield 1.0 if scale is None else float(scale), overflow is not None and bool(overflow)
    finally:
        vars(optimizer).update(hung)

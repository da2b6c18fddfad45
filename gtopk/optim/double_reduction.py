"""Refuses, by name, gradients that DDP or another optimizer would exchange a second time."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterable, Mapping
from typing import Any, Final
from weakref import WeakSet

import torch
from torch.utils.weak import TensorWeakRef


def refuse_ddp(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Raise ValueError where DDP reduces the gradients of one of these parameters already."""
    # DDP needs torch's process group; where there is none, the tenth of a second is saved.
    if not (
        "torch.nn.parallel.distributed" in sys.modules
        and torch.distributed.is_available()
        and torch.distributed.is_initialized()
    ):
        return
    if groups_of_ddp(parameters):
        raise ValueError(
            "DistributedDataParallel and DistributedOptimizer both reduce this model's "
            "gradients, and DDP sends them whole: give DistributedOptimizer the plain model, "
            "or keep DDP with gtopk.ddp.gtopk_hook and a plain optimizer"
        )


def groups_of_ddp(parameters: Iterable[torch.Tensor]) -> list[Any]:
    """Return the process group of each DDP that reduces gradients of these parameters.

    DDP leaves no mark on a parameter, but keeps its parameters in a list, to which the garbage
    collector leads from a parameter. A walk over all objects would hold tuples that other threads
    are still filling: CPython raises then.
    """
    ours = list(parameters)
    lists = [
        each for each in gc.get_referrers(*ours) if isinstance(each, list) and each is not ours
    ]
    found = []
    for owner in gc.get_referrers(*lists):
        # Since Python 3.11 an object may have no dict, and is the referrer itself.
        kept = owner if isinstance(owner, dict) else getattr(owner, "__dict__", {})
        if "reducer" in kept and any(kept.get("_module_parameters") is each for each in lists):
            found.append(kept["process_group"])
    return found


class SharedParameters:
    """Knows, for one optimizer, which others step some of its parameters, too.

    `note_agreed` after an exchange; `refuse_agreed` before the next.
    """

    def __init__(self, names: Mapping[torch.nn.Parameter, str]) -> None:
        self._names = names
        self._others: WeakSet[SharedParameters] = WeakSet()
        self._agreed: dict[torch.nn.Parameter, tuple[TensorWeakRef, int]] = {}
        with _adding:
            for other in _living:
                if any(parameter in other._names for parameter in names):
                    self._others.add(other)
                    other._others.add(self)
            _living.add(self)

    def note_agreed(self) -> None:
        """Note that the gradients are agreed ones, exchanged by this optimizer."""
        self._agreed = {
            p: (TensorWeakRef(p.grad), p.grad._version)
            for p in (self._names if self._others else ())
            if p.grad is not None
        }

    def refuse_agreed(self, rank: int) -> None:
        """Raise ValueError where another optimizer has exchanged a gradient already."""
        # A copy: an optimizer that is made in another thread adds itself.
        with _adding:
            others = [*self._others]
        for parameter in self._names if others else ():
            if any(other._has_agreed(parameter) for other in others):
                raise ValueError(
                    f"rank {rank}: two DistributedOptimizers step parameter "
                    f"'{self._names[parameter]}' after one backward pass, and its gradient would "
                    "be exchanged twice: give each parameter to one of them, or run a backward "
                    "pass of its own for each"
                )

    def _has_agreed(self, parameter: torch.nn.Parameter) -> bool:
        """Tell whether a gradient is the one that was noted, and unchanged since."""
        if parameter.grad is None or parameter not in self._agreed:
            return False
        gradient, version = self._agreed[parameter]
        return gradient() is parameter.grad and version == parameter.grad._version


_adding: Final = threading.Lock()  # ranks may be threads
_living: Final[WeakSet[SharedParameters]] = WeakSet()

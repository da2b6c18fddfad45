"""Wrapping: an optimizer of a class derived from the user's own, which shares its groups and state.

So `isinstance` tells the same of it, and schedulers go on to work, those made before included.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch


class Wrapping(torch.optim.Optimizer):
    """What is mixed into the class of the wrapped optimizer."""

    _wrapped: torch.optim.Optimizer

    @property
    def apart(self) -> Collection[torch.nn.Parameter]:
        """Return the parameters that are each rank's own now; the others are the same on all."""
        return ()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped optimizer's state.

        The parameter groups stay the same objects: schedulers made before wrapping hold them.
        """
        groups = self.param_groups
        super().load_state_dict(state_dict)
        for group, loaded in zip(groups, self.param_groups, strict=True):
            group.clear()
            group.update(loaded)
        self.param_groups = groups

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied or pickled: the copy's gradients would be reduced a second time."""
        raise TypeError(
            "a distributed optimizer can be neither copied nor pickled: it belongs to the ranks of "
            "a running job. Keep its state_dict(), or copy the plain optimizer and wrap the copy"
        )

    def _step_wrapped(self) -> None:
        """Step as the wrapped optimizer does, with the gradients as they are."""
        super().step()
        self._wrapped._opt_called = True  # type: ignore[attr-defined]  # schedulers made before


def wrap(optimizer: torch.optim.Optimizer, kind: type[Wrapping]) -> Any:
    """Return the optimizer with a kind mixed in.

    Raises ValueError for LBFGS, and for an optimizer that is wrapped already.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS evaluates its closure many times a step; use another optimizer")
    if isinstance(optimizer, Wrapping):
        raise ValueError("the optimizer is distributed already; wrap the plain one")
    own = type(optimizer)
    wrapped: Any = object.__new__(type(own.__name__, (kind, own), {}))
    wrapped.__dict__.update(optimizer.__dict__)
    wrapped._wrapped = optimizer
    # A scheduler that was made before hangs its own step on the instance; ours comes first.
    wrapped.__dict__.pop("step", None)
    return wrapped

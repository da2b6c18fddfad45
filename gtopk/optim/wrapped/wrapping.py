"""Wrapping: an optimizer of a class derived from the user's own, which shares its groups and state.

So `isinstance` tells the same of it, and schedulers go on to work, those made before included.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import wraps
from typing import Any

import torch

from ...exchange.buckets.placeholders import placeholders, renew, take_away
from .tree import lay_out_as_parameters


class Wrapping(torch.optim.Optimizer):
    """What is mixed into the class of the wrapped optimizer.

    Groups and state are looked up in the wrapped one: so both have the same, also after either of
    them, or an optimizer within, has loaded others.
    """

    _wrapped: torch.optim.Optimizer

    @property
    def param_groups(self) -> Any:
        """The wrapped optimizer's."""
        return self._wrapped.param_groups

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self._wrapped.param_groups = groups

    @property
    def state(self) -> Any:
        """The wrapped optimizer's."""
        return self._wrapped.state

    @state.setter
    def state(self, state: Any) -> None:
        self._wrapped.state = state

    @property
    def apart(self) -> Collection[torch.nn.Parameter]:
        """Return the parameters that are each rank's own now; the others are the same on all."""
        return ()

    def besides(self) -> list[torch.optim.Optimizer]:
        """Return the other optimizers that all ranks step with alike."""
        return []

    def in_common(self) -> Any:
        """Return where all ranks are besides, of types that the object codec has; None: nowhere."""
        return None

    def go_on_from(self, common: Any) -> None:
        """Be where another rank is, by what its `in_common` has returned."""

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Load the wrapped optimizer's state, laid out as its parameters are here."""
        super().load_state_dict(state_dict, *args, **kwargs)
        lay_out_as_parameters(self)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients; placeholders that zeros are written into stay so."""
        untouched = placeholders(_parameters(self))
        super().zero_grad(*args, **kwargs)
        renew(untouched)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over groups and state, as torch does when it has loaded them."""
        self._wrapped.__setstate__(state)

    def _patch_step_function(self) -> None:
        """Let torch call its hooks around the wrapped step alone: once, after the exchange."""
        self._wrapped._patch_step_function()
        self._zero_grad_profile_name = self._wrapped._zero_grad_profile_name

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied or pickled: the copy's gradients would be reduced a second time."""
        raise TypeError(
            "a distributed optimizer can be neither copied nor pickled: it belongs to the ranks of "
            "a running job. Keep its state_dict(), or copy the plain optimizer and wrap the copy"
        )

    def _step_wrapped(self) -> None:
        """Step as the wrapped optimizer does, with the gradients as they are."""
        take_away(_parameters(self))
        super().step()
        self._wrapped._opt_called = True  # type: ignore[attr-defined]  # schedulers made before

    def _take_agreed_step(self, step: Callable[[Any], None]) -> None:
        """Step by this in place of the wrapped optimizer's own way, between its hooks."""
        take_away(_parameters(self))
        self.profile_hook_step(step)(self)
        self._wrapped._opt_called = True  # type: ignore[attr-defined]  # schedulers made before


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def wrap(optimizer: torch.optim.Optimizer, kind: type[Wrapping]) -> Any:
    """Return the optimizer with a kind mixed in.

    Raises ValueError for LBFGS, and for an optimizer that is wrapped already.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS evaluates its closure many times a step; use another optimizer")
    if isinstance(optimizer, Wrapping):
        raise ValueError("the optimizer is distributed already; wrap the plain one")
    own = type(optimizer)

    @wraps(own.zero_grad)  # libraries look whether it takes set_to_none
    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        super(made, self).zero_grad(*args, **kwargs)

    made: Any = type(own.__name__, (kind, own), {"zero_grad": zero_grad})
    wrapped = object.__new__(made)
    wrapped.__dict__.update(vars(optimizer))
    wrapped._wrapped = optimizer
    # A scheduler that was made before hangs its own step on the instance; ours comes first.
    for shadowed in ("step", "param_groups", "state"):
        wrapped.__dict__.pop(shadowed, None)
    return wrapped

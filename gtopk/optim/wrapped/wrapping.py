"""Wrapping: makes an optimizer of a class derived from the user's own, with its groups and state.

So `isinstance` holds for it as for the user's, and schedulers work, also those made before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import wraps
from typing import Any

import torch

from ...exchange.buckets.placeholders import placeholders, remove_placeholders, renew
from .tree import lay_out_as_parameters


class Wrapping(torch.optim.Optimizer):
    """A mixin: `wrap` derives a class from (this, the user's optimizer class).

    So super().step() is the user's step. Groups and state are looked up in the wrapped optimizer:
    both have the same, also after either of them, or an optimizer within, has loaded others.
    """

    _wrapped: torch.optim.Optimizer

    @property
    def param_groups(self) -> Any:
        """The wrapped optimizer's groups."""
        return self._wrapped.param_groups

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self._wrapped.param_groups = groups

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state."""
        return self._wrapped.state

    @state.setter
    def state(self, state: Any) -> None:
        self._wrapped.state = state

    @property
    def diverging_parameters(self) -> Collection[torch.nn.Parameter]:
        """Return the parameters whose values may now differ between ranks; others are the same."""
        return ()

    def outer_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return further optimizers, which all ranks step alike: LocalSGD's outer one."""
        return []

    def shared_layout(self) -> list[str]:
        """Return in words what must be equal on all ranks, where they are to share their state."""
        return []

    def shared_state(self) -> Any:
        """Return what else all ranks share, beyond groups and `state`; None: nothing.

        Of types that `runtime.object_codec` encodes: another rank's `load_shared_state` may get it.
        """
        return None

    def load_shared_state(self, common: Any) -> None:
        """Take over the shared state of another rank, as its `shared_state` returned it."""

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Load the wrapped optimizer's state, in the memory layout of its parameters here."""
        super().load_state_dict(state_dict, *args, **kwargs)
        lay_out_as_parameters(self)

    @property
    def _own_parameters(self) -> list[torch.nn.Parameter]:
        """All parameters, in their order."""
        # As `parameters_of`, without a way through its file in each step: see `make crossings`.
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients; those that are placeholders, of zeros, stay placeholders."""
        untouched = placeholders(self._own_parameters)
        super().zero_grad(*args, **kwargs)
        renew(untouched)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over groups and state, as torch does when it has loaded them."""
        self._wrapped.__setstate__(state)

    def _patch_step_function(self) -> None:
        """Patch the wrapped step only, so that torch calls its hooks once, after the exchange."""
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
        remove_placeholders(self._own_parameters)
        super().step()
        self._wrapped._opt_called = True  # type: ignore[attr-defined]  # schedulers made before

    def _take_agreed_step(self, step: Callable[[Any], None]) -> None:
        """Call this in place of the wrapped optimizer's step, between that one's hooks."""
        remove_placeholders(self._own_parameters)
        # With torch's wrapper, so that the optimizer's hooks and a profiler see a step.
        self.profile_hook_step(step)(self)
        self._wrapped._opt_called = True  # type: ignore[attr-defined]  # schedulers made before


def wrap(optimizer: torch.optim.Optimizer, kind: type[Wrapping]) -> Any:
    """Return an optimizer of a class derived from (kind, the optimizer's own class).

    Raises ValueError for LBFGS, and for an optimizer that is wrapped already.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS evaluates its closure many times a step; use another optimizer")
    if isinstance(optimizer, Wrapping):
        raise ValueError("the optimizer is distributed already; wrap the plain one")
    own = type(optimizer)

    @wraps(own.zero_grad)  # libraries inspect whether its signature has set_to_none
    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        super(made, self).zero_grad(*args, **kwargs)

    made: Any = type(own.__name__, (kind, own), {"zero_grad": zero_grad})
    # Not by the class's __init__, whose arguments are unknown here.
    wrapped = object.__new__(made)
    wrapped.__dict__.update(vars(optimizer))
    wrapped._wrapped = optimizer
    # A scheduler made before has set a `step` of its own on the instance: remove it, so that the
    # derived class's is found.
    for shadowed in ("step", "param_groups", "state"):
        wrapped.__dict__.pop(shadowed, None)
    return wrapped

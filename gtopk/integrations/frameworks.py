"""Frameworks: a hook's state for a framework's wrapped optimizers, and for its checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch

from ..optim.wrapped.adam_step import plain


class HookState(Protocol):
    """The interface of a communication hook's state; see `gtopk.ddp.GTopKState`."""

    def drop_skipped(self, optimizer: torch.optim.Optimizer, *call: Any) -> None: ...
    def gather_state(self, model: torch.nn.Module) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any], model: torch.nn.Module) -> None: ...


State = TypeVar("State", bound=HookState)


def state_for(
    make: Callable[..., State], optimizers: Sequence[Any], density: float, **options: Any
) -> State:
    """Return a hook's state for optimizers, plain or as a framework has wrapped them.

    A single optimizer is given to the state. Several only drop gradients of steps that do not
    count.
    """
    own = [*map(plain, optimizers)]
    state = make(density, **{"optimizer": own[0] if len(own) == 1 else None, **options})
    for each in own if len(own) > 1 else []:
        each.register_step_pre_hook(state.drop_skipped)
    return state


class Stateful:
    """A hook's state with its model: has the `state_dict` and `load_state_dict` of frameworks."""

    def __init__(self, state: HookState, model: torch.nn.Module) -> None:
        self._state, self._model = state, model

    def state_dict(self) -> dict[str, Any]:
        return self._state.gather_state(self._model)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._state.load_state_dict(state, self._model)
